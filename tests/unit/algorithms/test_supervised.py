"""Test losses of supervised fine-tuning and reward models: hand-worked values, loops and torch, and masked values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from rlhf_mcore.algorithms.supervised import bradley_terry_loss, perplexity, sft_loss
from tests.rows import token_weights

NAN, INF = float("nan"), float("inf")


def test_sft_by_hand():
    logprobs = torch.tensor([[-1.0, -3.0, NAN]], requires_grad=True)
    loss, metrics = sft_loss(logprobs, torch.tensor([[0.5, 0.25, 0.0]]))
    loss.backward()
    assert loss.item() == 1.25 and metrics["nll"].item() == 4.0  # 0.5 * 1 + 0.25 * 3; 1 + 3
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-0.5, -0.25, 0.0]]


def test_sft_is_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 11, generator=generator), torch.randint(0, 11, (2, 5), generator=generator)
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, False, True]])
    logprobs = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    loss, metrics = sft_loss(logprobs, token_weights(mask, "token", num_tokens=5, num_rows=2))
    expected = cross_entropy(logits.flatten(0, 1), labels.masked_fill(~mask, -100).flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["nll"].item() == pytest.approx(5 * expected.item(), rel=1e-6)


def test_bradley_terry_by_hand():
    # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, and 1/2 for a tie.
    chosen = torch.tensor([2.0 + math.log(3), 0.0, 1.0], requires_grad=True)
    rejected = torch.tensor([2.0, math.log(3), 1.0], requires_grad=True)
    loss, metrics = bradley_terry_loss(chosen, rejected, torch.full((3,), 1 / 3))
    loss.backward()
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.25) + math.log(0.5)) / 3, rel=1e-6)
    # -(1 - sigmoid) w for the chosen response, and the opposite for the rejected one.
    torch.testing.assert_close(chosen.grad, -torch.tensor([0.25, 0.75, 0.5]) / 3)
    torch.testing.assert_close(rejected.grad, torch.tensor([0.25, 0.75, 0.5]) / 3)
    assert metrics["accuracy"].item() == 1.5
    assert metrics["margin"].item() == pytest.approx(0.0, abs=1e-6)
    assert metrics["chosen"].item() == pytest.approx(3.0 + math.log(3))


def test_margins_and_centering_by_hand():
    # c - r - m = log 3 and -log 3; centering 0.1 of (2 log 3 + 0)^2 and 0.
    log3 = math.log(3)
    chosen, rejected = torch.tensor([2 * log3, log3]), torch.tensor([0.0, -log3])
    margins = torch.tensor([log3, 3 * log3])
    loss, metrics = bradley_terry_loss(chosen, rejected, torch.full((2,), 0.5), margins=margins, centering=0.1)
    assert loss.item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2 + 0.1 * (2 * log3) ** 2 / 2, rel=1e-6)
    assert metrics["accuracy"].item() == 2  # compares the rewards themselves


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_padding_reaches_nothing(garbage: float):
    def run(poison: float) -> list[float]:
        chosen = torch.tensor([1.0, poison], requires_grad=True)
        rejected = torch.tensor([0.5, -poison], requires_grad=True)
        weights, margins = torch.tensor([0.5, 0.0]), torch.tensor([0.1, poison])
        loss, metrics = bradley_terry_loss(chosen, rejected, weights, margins=margins, centering=0.2)
        loss.backward()
        assert chosen.grad is not None and rejected.grad is not None
        gradients = [*chosen.grad.tolist(), *rejected.grad.tolist()]
        return [loss.item(), *gradients, *(metric.item() for metric in metrics.values())]

    assert run(garbage) == run(0.0)


def test_extreme_differences_stay_finite():
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss, _ = bradley_terry_loss(chosen, -chosen.detach(), torch.ones(2))
    loss.backward()
    assert loss.item() == pytest.approx(2e4) and chosen.grad is not None
    assert chosen.grad.tolist() == [-1.0, 0.0]


pairs = st.lists(st.tuples(*[st.floats(-4, 4, width=32)] * 3), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(pairs=pairs, centering=st.sampled_from([0.0, 0.01]), cut=st.integers(0, 8))
def test_against_a_loop_however_pairs_are_cut(pairs: list[tuple[float, float, float]], centering: float, cut: int):
    expected = sum((math.log1p(math.exp(-(c - r - m))) + centering * (c + r) ** 2) / len(pairs) for c, r, m in pairs)
    total, right = 0.0, 0.0
    for part in (pairs[:cut], pairs[cut:]):
        chosen, rejected, margins = torch.tensor(part).reshape(-1, 3).unbind(-1)
        weights = torch.full((len(part),), 1 / len(pairs))
        loss, metrics = bradley_terry_loss(chosen, rejected, weights, margins=margins, centering=centering)
        total, right = total + loss.item(), right + metrics["accuracy"].item()
    assert total == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert right == sum((c > r) + 0.5 * (c == r) for c, r, _ in pairs)


def test_perplexity_never_overflows():
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(1e6) == INF
