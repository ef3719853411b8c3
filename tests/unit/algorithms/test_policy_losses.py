"""Compare dual clip, GSPO, CISPO and other losses with hand-worked values and slow versions, and check shared properties."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhf_mcore.algorithms.policy_loss  # noqa: F401  # its losses are in the table
from rlhf_mcore.algorithms.interfaces import POLICY_LOSSES, LossInputs, bind
from rlhf_mcore.algorithms.policy_loss import cispo, gspo, ppo_clip
from rlhf_mcore.config.schema import AlgorithmConfig
from tests.rows import token_weights
from tests.unit.algorithms.tokens import loss_inputs
from tests.unit.pairs import each_value, pairwise

NAN, INF = float("nan"), float("inf")


def tokens(ratios: list[list[float]], advantages: list[list[float]], weight: float) -> tuple[torch.Tensor, LossInputs]:
    """Build rows of equally weighted tokens with these ratios. Returns also the logprobs as the variable of gradients."""
    old = torch.full((len(ratios), len(ratios[0])), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    weights = torch.full_like(old, weight)
    return logprobs, loss_inputs(logprobs, old, torch.tensor(advantages), weights)


def test_dual_clip_by_hand():
    # c = 3, clip 0.2. Negative advantages at ratios 5, 2.5, 0.5: -10 is raised to 3 * -2 = -6; -5 stays; min(-1,
    # -1.6) = -1.6 stays.
    # A positive advantage at ratio 5 is clipped from above as usual: 1.2 * 2.
    logprobs, made = tokens([[5.0, 2.5, 0.5, 5.0]], [[-2.0, -2.0, -2.0, 2.0]], weight=0.25)
    loss, metrics = ppo_clip(made, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.backward()
    assert loss.item() == pytest.approx((6 + 5 + 1.6 - 2.4) / 4)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 5.0 / 4, 0.0, 0.0]]))
    assert metrics["clip_fraction_dual"].item() == 1
    assert metrics["clip_fraction_low"].item() == 1 and metrics["clip_fraction_high"].item() == 1


def test_gspo_by_hand():
    # Ratios 2 and 1/2 give the sequence ratio exp((log 2 - log 2) / 2) = 1. Ratios 4 and 1 give exp(log 4 / 2) = 2,
    # above 1 + 0.5.
    logprobs, made = tokens([[2.0, 0.5], [4.0, 1.0]], [[3.0, 3.0], [1.0, 1.0]], weight=0.25)
    loss, metrics = gspo(made, clip_low=0.5, clip_high=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-(3 + 3 + 1.5 + 1.5) / 4)
    # The second sequence is clipped as a whole. Each token of the first contributes -w A s.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.75, -0.75], [0.0, 0.0]]))
    assert metrics["clip_fraction_high"].item() == 2 and metrics["clip_fraction_low"].item() == 0
    assert metrics["importance_ratio"].item() == pytest.approx(1 + 1 + 2 + 2)


def test_gspo_is_the_papers_sequence_loss():
    """Equation 5, with s differentiated as a whole, and the weights of ``sequence`` aggregation."""
    torch.manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    old, noise = -torch.rand(3, 5), 0.3 * torch.randn(3, 5)
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 5)
    weights = token_weights(mask, "sequence", num_tokens=6, num_rows=3)
    logprobs = (old + noise).requires_grad_()
    loss, _ = gspo(loss_inputs(logprobs, old, advantages, weights), clip_low=0.1, clip_high=0.05)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros(())
    for row in range(3):
        s = (logprobs - old)[row][mask[row]].mean().exp()
        a = advantages[row, 0]
        expected = expected - torch.min(s * a, s.clamp(0.9, 1.05) * a) / 3
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_cispo_by_hand():
    # Ratios 6, 6, 0.25 with bounds 0.5 and 5; logprobs are -1 + log ratio. loss = -w clip(r) A logprob, its gradient -w clip(r) A.
    logprobs, made = tokens([[6.0, 6.0, 0.25]], [[1.0, -1.0, 2.0]], weight=1.0)
    loss, metrics = cispo(made, clip_low=0.5, clip_high=4.0)
    loss.backward()
    above, below = math.log(6) - 1, math.log(0.25) - 1
    assert loss.item() == pytest.approx(-5 * above + 5 * above - 0.5 * 2 * below, rel=1e-5)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-5.0, 5.0, -1.0]]))
    # Bounds apply for both signs of the advantage.
    assert metrics["clip_fraction_high"].item() == 2 and metrics["clip_fraction_low"].item() == 1


def test_gmpo_is_the_papers_sequence_loss():
    """Equation 4, with the geometric mean differentiated as a whole, and the weights of ``sequence`` aggregation."""
    torch.manual_seed(1)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    old, noise = -torch.rand(3, 5), 0.4 * torch.randn(3, 5)
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 5)
    logprobs = (old + noise).requires_grad_()
    made = loss_inputs(logprobs, old, advantages, token_weights(mask, "sequence", num_tokens=6, num_rows=3))
    loss, _ = POLICY_LOSSES["gmpo"](made, clip_low=0.2, clip_high=0.3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros(())
    for row in range(3):
        ratios, a = (logprobs - old)[row][mask[row]].exp(), advantages[row, 0]
        bounded = ratios.clamp(max=math.exp(0.3)) if a > 0 else ratios.clamp(min=math.exp(-0.2))
        expected = expected - a * bounded.prod() ** (1 / len(ratios)) / 3
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_sapo_by_hand():
    # tau 1 and 2: at ratio 2 the gates are 4 sigmoid(1) and 2 sigmoid(2). Each slope is 4 s(1 - s) times the ratio.
    logprobs, made = tokens([[2.0, 2.0]], [[1.0, -1.0]], weight=1.0)
    loss, _ = POLICY_LOSSES["sapo"](made, tau_positive=1.0, tau_negative=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-4 * 0.731058579 + 2 * 0.880797078, rel=1e-6)
    slopes = [-4 * 0.196611933 * 2, 4 * 0.104993585 * 2]
    torch.testing.assert_close(logprobs.grad, torch.tensor([slopes]), rtol=1e-5, atol=1e-6)


def test_dppo_by_hand():
    # Old probability 0.5, new ones 0.7 and 0.3. If A has the sign of the change, the token is 0.2 too far. Otherwise it returns.
    old = torch.full((1, 4), math.log(0.5))
    logprobs = torch.tensor([[0.7, 0.3, 0.7, 0.3]]).log().requires_grad_()
    made = loss_inputs(logprobs, old, torch.tensor([[1.0, -1.0, -1.0, 1.0]]), torch.ones(1, 4))
    loss, metrics = POLICY_LOSSES["dppo_tv"](made, clip_low=0.15, clip_high=0.15)
    loss.backward()
    assert loss.item() == pytest.approx(1.4 - 0.6)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 0.0, 1.4, -0.6]]))
    assert metrics["clip_fraction_low"].item() == 1 and metrics["clip_fraction_high"].item() == 1
    # KL of the two Bernoulli distributions: 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872, the same in both directions.
    assert POLICY_LOSSES["dppo_kl"](made, clip_low=0.0871, clip_high=0.0871)[0].item() == pytest.approx(0.8)
    assert POLICY_LOSSES["dppo_kl"](made, clip_low=0.0872, clip_high=0.0872)[0].item() == pytest.approx(0.0, abs=1e-6)


def test_dppo_kl_leaves_out_what_has_become_certain():
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    made = loss_inputs(logprobs, torch.tensor([[-1e-7, 0.0]]), torch.ones(1, 2), torch.ones(1, 2))
    loss, metrics = POLICY_LOSSES["dppo_kl"](made, clip_low=0.2, clip_high=0.05)
    assert loss.item() == pytest.approx(-1.0) and metrics["clip_fraction_high"].item() == 1


# Slow versions compute one token after the other, in floats.


def geometric_mean(row: list[tuple[float, float, float]], cfg: AlgorithmConfig) -> float:
    """Return (prod of min(r, e^high) for A > 0, max(r, e^-low) for A < 0 and 1 for A = 0)^(1 / length)."""
    product = 1.0
    for logprob, old, advantage in row:
        ratio = math.exp(logprob - old)
        if advantage > 0:
            product *= min(ratio, math.exp(cfg.clip_high))
        elif advantage < 0:
            product *= max(ratio, math.exp(-cfg.clip_low))
    return product ** (1 / len(row))


def is_left_out(name: str, logprob: float, old: float, advantage: float, cfg: AlgorithmConfig) -> bool:
    """Return whether DPPO leaves a token out.

    The divergence between two Bernoulli distributions counts in the direction of the advantage.
    """
    p, q = math.exp(logprob), math.exp(old)
    if name == "dppo_tv":
        divergence = abs(p - q)
    else:
        divergence = q * math.log(q / p)
        if q < 1:
            divergence += (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
    if advantage > 0:
        return p > q and divergence > cfg.clip_high
    return advantage < 0 and p < q and divergence > cfg.clip_low


def slow_loss(name: str, rows: list[list[tuple[float, float, float]]], cfg: AlgorithmConfig) -> float:
    """Return the mean over all tokens (logprob, old logprob, advantage) of the rows."""
    total, count = 0.0, 0
    for row in rows:
        for logprob, old, advantage in row:
            ratio = math.exp(logprob - old)
            if name == "gspo":
                ratio = math.exp(sum(a - b for a, b, _ in row) / len(row))
            clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
            value = min(ratio * advantage, clipped * advantage)
            if name == "cispo":
                value = clipped * advantage * logprob
            elif name == "gmpo":
                value = geometric_mean(row, cfg) * advantage
            elif name == "sapo":
                tau = cfg.sapo.tau_positive if advantage > 0 else cfg.sapo.tau_negative
                value = 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
            elif name == "kl_cov":
                value = ratio * advantage
            elif name.startswith("dppo"):
                value = 0.0 if is_left_out(name, logprob, old, advantage, cfg) else ratio * advantage
            elif name == "ppo_clip" and cfg.dual_clip is not None and advantage < 0:
                value = max(value, cfg.dual_clip * advantage)
            total -= value
            count += 1
    return total / max(count, 1)


logprob = st.floats(-2, 0, width=32)
token = st.tuples(logprob, logprob, st.floats(-2, 2, width=32))
batches = st.lists(st.lists(token, max_size=5), min_size=1, max_size=5)
configs = st.builds(
    AlgorithmConfig,
    clip_low=st.sampled_from([0.1, 0.5, 1.0]),
    clip_high=st.sampled_from([0.1, 0.5]),
    dual_clip=st.sampled_from([None, 2.0, 3.0]),
)


def compute(
    name: str, made: LossInputs, cfg: AlgorithmConfig | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss with the settings of a configuration."""
    return bind(POLICY_LOSSES[name], cfg or AlgorithmConfig())(made)


def pad_rows(rows: list[list[tuple[float, float, float]]], garbage: float) -> tuple[torch.Tensor, LossInputs]:
    """Pad the rows in one microbatch, each after two positions of garbage."""
    width = 7
    filled = [[(garbage,) * 3] * 2 + row + [(garbage,) * 3] * (width - 2 - len(row)) for row in rows]
    new, old, advantages = (part.contiguous() for part in torch.tensor(filled).unbind(-1))
    mask = torch.tensor([[2 <= t < 2 + len(row) for t in range(width)] for row in rows])
    weights = token_weights(mask, "token", num_tokens=sum(map(len, rows)), num_rows=len(rows))
    new.requires_grad_()
    return new, loss_inputs(new, old, advantages, weights)


def pack_rows(made: LossInputs) -> LossInputs:
    """Pack all rows of a padded microbatch."""
    flat = [
        getattr(made, name).reshape(1, -1) for name in ("logprobs", "old_logprobs", "advantages", "mask", "weights")
    ]
    fields = {name: values.reshape(1, -1) for name, values in made.fields.items()}
    return LossInputs(*flat, made.sequence_ids.reshape(1, -1), made.num_sequences, fields)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=20, deadline=None)
@given(rows=batches, cfg=configs)
def test_against_the_slow_version_padded_and_packed(name: str, rows: list, cfg: AlgorithmConfig):
    logprobs, made = pad_rows(rows, garbage=NAN)
    loss, metrics = compute(name, made, cfg)
    loss.backward()
    assert loss.item() == pytest.approx(slow_loss(name, rows, cfg), rel=1e-4, abs=1e-5)
    assert logprobs.grad is not None and logprobs.grad[made.weights == 0].eq(0).all()
    assert logprobs.grad.isfinite().all()
    again, packed_metrics = compute(name, pack_rows(made), cfg)
    # The sum of up to 25 terms, at most 2 exp(2) in total, in another order: 24 times half a unit in the last place of 8 to 16.
    assert again.item() == pytest.approx(loss.item(), rel=1e-5, abs=24 * 2**-21)
    for key, value in metrics.items():
        assert packed_metrics[key].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)


@each_value(
    ("name", list(POLICY_LOSSES)),
    ("garbage", [NAN, INF, -INF, 1e30]),
)
def test_garbage_in_padding_reaches_nothing(name: str, garbage: float):
    rows = [[(-1.0, -1.2, 1.0), (-0.5, -0.1, 1.0)], [(-2.0, -1.0, -1.0)]]
    cfg = AlgorithmConfig(dual_clip=3.0)

    def run(poison: float) -> list[float]:
        logprobs, made = pad_rows(rows, poison)
        loss, metrics = compute(name, made, cfg)
        loss.backward()
        assert logprobs.grad is not None
        return [loss.item(), *logprobs.grad.flatten().tolist(), *(m.item() for m in metrics.values())]

    assert run(0.0) == run(garbage)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradients_are_those_of_reinforce(name: str):
    # At ratio 1 every loss has the gradient -w A.
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], requires_grad=True)
    advantages = torch.tensor([[0.7, -0.3], [2.0, 0.0]])
    weights = torch.tensor([[0.25, 0.5], [0.1, 0.2]])
    loss, metrics = compute(name, loss_inputs(logprobs, logprobs.detach(), advantages, weights))
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -weights * advantages)
    assert metrics["importance_ratio"].item() == pytest.approx(4.0) and metrics["approx_kl"].item() == 0.0
    assert not any(metric.requires_grad for metric in metrics.values())


@pairwise(
    ("name", list(POLICY_LOSSES)),
    ("advantage", [-1.0, 1.0]),
    ("logprob", [0.0, -500.0]),
)
def test_runaway_ratios_stay_finite(name: str, advantage: float, logprob: float):
    logprobs = torch.tensor([[logprob, -1.0]], requires_grad=True)
    made = loss_inputs(
        logprobs, torch.tensor([[-500.0 - logprob, -1.0]]), torch.full((1, 2), advantage), torch.ones(1, 2)
    )
    loss, metrics = compute(name, made)
    loss.backward()
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_reports_the_same_four_sums(name: str):
    one: Callable[..., torch.Tensor] = torch.ones
    _, metrics = compute(name, loss_inputs(one(1, 2), one(1, 2), one(1, 2), one(1, 2)))
    assert set(metrics) == {"clip_fraction_low", "clip_fraction_high", "approx_kl", "importance_ratio"}


def test_a_token_without_weight_stays_in_its_sequences_ratio():
    """Log ratios log 2 and log 8 give s = sqrt(16) = 4, clipped at 5/4. Only the loss leaves out the second token."""
    new = torch.tensor([[math.log(2.0), math.log(8.0)]], requires_grad=True)
    weights = torch.tensor([[0.5, 0.5]])
    made = loss_inputs(new, torch.zeros(1, 2), torch.full((1, 2), -1.0), weights)
    made.weights = torch.tensor([[0.5, 0.0]])
    loss, metrics = POLICY_LOSSES["gspo"](made, clip_low=0.25, clip_high=0.25)
    loss.backward()
    # A = -1 and s above the range is not clipped. The loss is 1/2 s = 2, and its gradient 1/2 s at the weighted token.
    assert loss.item() == pytest.approx(2.0) and new.grad.tolist() == [pytest.approx([2.0, 0.0])]
    assert metrics["importance_ratio"].item() == pytest.approx(8.0)


def test_a_far_token_counts_in_its_sequences_ratio_as_it_is_and_keeps_its_gradient():
    """Log ratios 50, -49.9 and 0.2 have a mean of 0.1.

    The ratio exp(0.1) is within the range, so each token's gradient is -A w s.
    """
    new = torch.tensor([[50.0, -49.9, 0.2]], dtype=torch.float64, requires_grad=True)
    zeros, third = torch.zeros(1, 3, dtype=torch.float64), torch.full((1, 3), 1 / 3, dtype=torch.float64)
    made = loss_inputs(new, zeros, third * 6, third)
    loss, _ = POLICY_LOSSES["gspo"](made, clip_low=0.25, clip_high=0.25)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.exp(0.1))
    assert new.grad.tolist() == [pytest.approx([-2 / 3 * math.exp(0.1)] * 3)]
