"""Test the clipped surrogate: hand-worked tokens, a slow loop, and the invariances on which training relies."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.interfaces import bind
from rlhf_mcore.algorithms.masking import AGGREGATIONS
from rlhf_mcore.algorithms.policy_loss import ppo_clip
from rlhf_mcore.config.schema import AlgorithmConfig
from tests.rows import token_weights
from tests.unit.algorithms.tokens import loss_inputs

NAN, INF = float("nan"), float("inf")


def clip(*tensors: torch.Tensor, **settings: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return bind(ppo_clip, AlgorithmConfig(**settings))(loss_inputs(*tensors))


def test_by_hand():
    # Six tokens of weight 1/6, clip_low 0.2, clip_high 0.3; ratios 1.5, 1.5, 0.5, 0.5, 1.25, 1.
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.25, 1.0]])
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0, 3.0]])
    logprobs = ratios.log().requires_grad_()
    weights = torch.full((1, 6), 1 / 6)
    loss, metrics = clip(logprobs, torch.zeros(1, 6), advantages, weights, clip_low=0.2, clip_high=0.3)
    # min(1.5*2, 1.3*2) = 2.6; min(-3, -2.6) = -3; min(1, 0.8*2) = 1; min(-1, -1.6) = -1.6; 1.25; 3. Sum 3.25.
    assert loss.shape == ()
    assert loss.item() == pytest.approx(-3.25 / 6)
    loss.backward()
    # -w * A * ratio if the unclipped term is smaller, otherwise 0. The first and the fourth token are clipped.
    expected = -torch.tensor([[0.0, -3.0, 1.0, 0.0, 1.25, 3.0]]) / 6
    torch.testing.assert_close(logprobs.grad, expected)

    assert metrics["clip_fraction_high"].item() == 1  # sums: the caller divides
    assert metrics["clip_fraction_low"].item() == 1
    assert metrics["importance_ratio"].item() == pytest.approx(6.25)  # 1.5 + 1.5 + 0.5 + 0.5 + 1.25 + 1
    # k3 of KL(old || new): r - 1 - log r. 2 * (0.5 - log 1.5) + 2 * (-0.5 + log 2) + 0.25 - log 1.25 + 0
    expected_kl = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 + math.log(2)) + 0.25 - math.log(1.25)
    assert metrics["approx_kl"].item() == pytest.approx(expected_kl, rel=1e-5)
    assert not any(metric.requires_grad for metric in metrics.values())


def test_on_policy_gradient_is_that_of_reinforce():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages, weights = torch.tensor([[0.7, -0.3]]), torch.tensor([[0.25, 0.5]])
    loss, _ = clip(logprobs, logprobs.detach(), advantages, weights, clip_low=0.2, clip_high=0.2)
    loss.backward()
    # ratio 1: loss -(0.25 * 0.7 - 0.5 * 0.3) = -0.025; gradient -w * A
    assert loss.item() == pytest.approx(-0.025)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.175, 0.15]]))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_garbage_in_padding_reaches_neither_loss_gradient_nor_metrics(garbage: float):
    clean = torch.tensor([[-1.0, -2.0, -0.5]])
    old = torch.tensor([[-1.1, -1.0, -0.5]])
    advantages = torch.tensor([[1.0, -1.0, 2.0]])
    results = []
    for poison in (0.0, garbage):
        pad = torch.tensor([[poison, -poison]])
        logprobs = torch.cat([clean, pad], dim=1).requires_grad_()
        loss, metrics = clip(
            logprobs,
            torch.cat([old, -pad], dim=1),
            torch.cat([advantages, pad], dim=1),
            torch.tensor([[0.3, 0.3, 0.3, 0.0, 0.0]]),
            clip_low=0.2,
            clip_high=0.2,
        )
        loss.backward()
        results.append([loss.item(), *logprobs.grad.flatten().tolist(), *(m.item() for m in metrics.values())])
    assert results[0] == results[1]
    assert results[1][4:6] == [0.0, 0.0]


def test_a_runaway_ratio_stays_finite():
    # exp(500) overflows. PPO does not clip a token with a negative advantage, so 1 * exp(20) remains, without a gradient.
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, _ = clip(
        logprobs,
        torch.tensor([[-500.0, -500.0]]),
        torch.tensor([[-1.0, 0.0]]),
        torch.ones(1, 2),
        clip_low=0.2,
        clip_high=0.2,
    )
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20))
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


def test_a_nan_in_a_trainable_token_is_not_hidden():
    loss, _ = clip(
        torch.tensor([[NAN]]), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), clip_low=0.2, clip_high=0.2
    )
    assert math.isnan(loss.item())


def slow_ppo(new: list[float], old: list[float], advantage: float, low: float, high: float) -> list[float]:
    """Return losses per token by the case table of the PPO paper's figure 1, without min or clamp."""
    losses = []
    for a, b in zip(new, old, strict=True):
        ratio = math.exp(a - b)
        if advantage > 0 and ratio > 1 + high:
            ratio = 1 + high
        elif advantage < 0 and ratio < 1 - low:
            ratio = 1 - low
        losses.append(-ratio * advantage)
    return losses


logprob = st.floats(-2, 0, width=32)
rows = st.lists(
    st.tuples(st.lists(st.tuples(logprob, logprob), max_size=5), st.floats(-2, 2, width=32)), min_size=1, max_size=6
).filter(lambda rows: any(tokens for tokens, _ in rows))


@settings(max_examples=25, deadline=None)
@given(rows=rows, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
def test_microbatches_packed_or_padded_add_up_to_the_whole(rows, aggregation: str, data: st.DataObject):
    """Loss and gradient do not depend on the split, packing and order of rows, and the loss equals the slow loop's."""
    num_tokens = sum(len(tokens) for tokens, _ in rows)
    expected = 0.0
    for tokens, advantage in rows:
        divisor = {"token": num_tokens, "sequence": max(len(tokens), 1) * len(rows), "constant": 7 * len(rows)}
        losses = slow_ppo([t[0] for t in tokens], [t[1] for t in tokens], advantage, 0.1, 0.3)
        expected += sum(losses) / divisor[aggregation]

    mask = torch.tensor([[t < len(tokens) for t in range(6)] for tokens, _ in rows])
    padded = [[*tokens, *[(NAN, NAN)] * (6 - len(tokens))] for tokens, _ in rows]
    new, old = torch.tensor(padded).unbind(-1)
    advantages = torch.tensor([advantage for _, advantage in rows]).unsqueeze(1).expand_as(new)

    def run(pieces: list[list[int]], packed: bool) -> tuple[float, torch.Tensor, dict[str, float]]:
        logprobs = new.clone().requires_grad_()
        total, sums = 0.0, {}
        for piece in pieces:
            kept = mask[piece]
            weights = token_weights(kept, aggregation, num_tokens=num_tokens, num_rows=len(rows), constant_length=7)
            inputs = [logprobs[piece], old[piece], advantages[piece], weights]
            if packed:
                inputs = [tensor[kept].unsqueeze(0) for tensor in inputs]
            loss, metrics = clip(*inputs, clip_low=0.1, clip_high=0.3)
            loss.backward()
            total += loss.item()
            sums = {name: sums.get(name, 0.0) + metric.item() for name, metric in metrics.items()}
        return total, logprobs.grad, sums

    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    pieces = [piece for piece in (order[:cut], order[cut:]) if piece]
    whole_loss, whole_gradient, whole_metrics = run([list(range(len(rows)))], packed=False)
    # A term is at most 2 exp(2). The log ratio's rounding, 2**-23, and the last place of the exponential are relative to it.
    rounded = 2 * math.exp(2) * 2**-21
    assert whole_loss == pytest.approx(expected, rel=1e-5, abs=rounded)
    for packed in (False, True):
        loss, gradient, metrics = run(pieces, packed)
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=rounded)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-7)
        assert metrics == pytest.approx(whole_metrics, rel=1e-4, abs=1e-5)
