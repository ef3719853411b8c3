"""Compare decoupled PPO (AReaL, arXiv 2505.24298, eq. 5) token by token with the correction and the clipped loss together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.correction import rollout_correction
from rlhf_mcore.algorithms.policy_loss import ppo_clip
from rlhf_mcore.config.schema import RolloutCorrectionConfig
from tests.rows import everything
from tests.unit.algorithms.tokens import loss_inputs

LOW, HIGH, CAP = 0.2, 0.3, 2.0
MAX_TOKEN_STALENESS = 2


@dataclass
class Token:
    """A token: logprobs under three policies, the advantage, and the number of versions from behaviour to proximal policy."""

    behaviour: float
    proximal: float
    current: float
    advantage: float
    staleness: int


def term(token: Token) -> tuple[float, float]:
    """Return a token's loss and its derivative with respect to the current logprob."""
    weight = min(math.exp(token.proximal - token.behaviour), CAP)
    if token.staleness > MAX_TOKEN_STALENESS:
        weight = 0.0
    ratio = math.exp(token.current - token.proximal)
    clipped = max(1 - LOW, min(1 + HIGH, ratio))
    taken = min(ratio * token.advantage, clipped * token.advantage)
    has_gradient = ratio == clipped or ratio * token.advantage < clipped * token.advantage
    return -weight * taken, -weight * token.advantage * ratio * has_gradient


logprobs = st.floats(-3, -0.1)
tokens = st.builds(Token, logprobs, logprobs, logprobs, st.floats(-2, 2), st.integers(0, 4))
responses = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(rows=responses)
def test_against_the_equation(rows: list[list[Token]]) -> None:
    every = [token for row in rows for token in row]
    ratios = [math.exp(token.current - token.proximal) for token in every]
    assume(all(abs(ratio - edge) > 1e-3 for ratio in ratios for edge in (1 - LOW, 1 + HIGH)))
    mask = torch.tensor([[t < len(row) for t in range(4)] for row in rows])

    def pad_field(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return a field in double precision. With a ratio of 18, rounding logprobs to fp32 would exceed the bounds below."""
        filled = [[getattr(token, name) for token in row] + [7] * (4 - len(row)) for row in rows]
        return torch.tensor(filled, dtype=dtype)

    current = pad_field("current").requires_grad_()
    proximal, ages = pad_field("proximal"), pad_field("staleness", torch.int64).flatten()
    cfg = RolloutCorrectionConfig(mode="token", cap=CAP, max_token_staleness=MAX_TOKEN_STALENESS)
    behaviour = pad_field("behaviour").flatten()
    factors, found = rollout_correction(proximal.flatten(), behaviour, mask.flatten(), everything(mask), cfg, ages)
    made = loss_inputs(current, proximal, pad_field("advantage"), mask.double() / len(every))
    made.weights = made.weights * factors.view_as(mask)
    loss, _ = ppo_clip(made, clip_low=LOW, clip_high=HIGH)
    loss.backward()
    expected = [term(token) for token in every]
    assert current.grad is not None
    assert loss.item() == pytest.approx(sum(value for value, _ in expected) / len(every), abs=1e-12)
    gradient = [slope / len(every) for _, slope in expected]
    assert current.grad[mask].tolist() == pytest.approx(gradient, abs=1e-12) and current.grad[~mask].eq(0).all()
    assert found["staleness_mean"] == pytest.approx(sum(token.staleness for token in every) / len(every))
    assert found["staleness_max"] == max(token.staleness for token in every)
    left_out = sum(token.staleness > MAX_TOKEN_STALENESS for token in every)
    assert found["stale_fraction"] == pytest.approx(left_out / len(every))


VOCAB = 3


def expected_gradient(mode: str, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients with respect to the proximal policy's logits [1 + VOCAB, VOCAB]: first token, and second token
    after each first.

    Both sum over all responses of two tokens, weighted by probability. The first samples from the behaviour policy and
    applies the correction. The second samples from the proximal policy.
    """
    generator = torch.Generator().manual_seed(2)
    policies = {
        name: torch.randn(1 + VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        for name in ("behaviour", "current")
    }
    scores = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    logits = policies["current"].requires_grad_()

    def gather_logprobs(table: torch.Tensor) -> torch.Tensor:
        log_p = table.log_softmax(-1)
        return torch.stack([log_p[0][pairs[:, 0]], log_p[1 + pairs[:, 0], pairs[:, 1]]], dim=1)

    current, behaviour = gather_logprobs(logits), gather_logprobs(policies["behaviour"])
    proximal, mask = current.detach(), torch.ones(len(pairs), 2, dtype=torch.bool)
    cfg = RolloutCorrectionConfig(mode=mode, cap=cap)
    found, _ = rollout_correction(
        proximal.flatten(), behaviour.flatten(), mask.flatten(), everything(mask), cfg, mask.flatten().int()
    )
    advantages = scores.flatten()[:, None].expand(mask.shape)
    gradients = []
    for drawn_from, factors in ((behaviour, found.view_as(mask)), (proximal, torch.ones_like(proximal))):
        weights = drawn_from.sum(1).exp()[:, None].expand(mask.shape)
        made = loss_inputs(current, proximal, advantages, weights)
        made.weights = weights * factors
        loss, _ = ppo_clip(made, clip_low=0.2, clip_high=0.2)
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    return gradients[0], gradients[1]


def test_what_an_older_policy_sampled_teaches_on_average_what_the_newer_one_would_have() -> None:
    found, expected = expected_gradient("sequence", cap=1e9)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    # A token's weight ignores the probability of the other token. Both are biased, but less than without a weight.
    token, off = (float((expected_gradient(mode, 1e9)[0] - expected).norm()) for mode in ("token", "off"))
    assert 0.01 < token < off
