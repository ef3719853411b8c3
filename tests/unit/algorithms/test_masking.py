"""Masked sums and the weights by which a loss is divided once, by global counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.masking import AGGREGATIONS, masked_sum, row_weights, weighted_sum

NAN = float("nan")


def test_a_masked_sum_ignores_nan_and_inf_outside_the_mask():
    values = torch.tensor([[1.0, NAN, 3.0], [float("inf"), 8.0, NAN]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    total = masked_sum(values, mask)
    assert total.item() == 12.0  # 1 + 3 + 8
    total.backward()
    assert values.grad is not None and values.grad.tolist() == [[1, 0, 1], [0, 1, 0]]


def test_an_empty_mask_has_sum_zero():
    values = torch.full((2, 2), NAN)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert masked_sum(values, nothing).item() == 0.0


def test_weighted_sum_skips_zero_weights_and_keeps_negative_ones():
    values = torch.tensor([2.0, NAN, 5.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.0, -0.1])
    total = weighted_sum(values, weights)
    total.backward()
    assert total.item() == pytest.approx(0.5)  # 0.5 * 2 - 0.1 * 5 = 1 - 0.5
    torch.testing.assert_close(values.grad, weights)


def test_a_nan_that_carries_weight_is_not_hidden():
    assert math.isnan(weighted_sum(torch.tensor([NAN, 1.0]), torch.tensor([0.5, 0.5])).item())


# Rows with 1, 3 and 0 trainable tokens; the minibatch over all ranks has 8 tokens in 5 rows.
COUNTS = torch.tensor([1, 3, 0])


@pytest.mark.parametrize(
    ("aggregation", "first", "second", "empty"),
    [
        ("token", 0.125, 0.125, 0.125),  # 1 / 8
        ("sequence", 0.2, 1 / 15, 0.2),  # 1 / (1 * 5), 1 / (3 * 5); no token has the last one
        ("constant", 0.02, 0.02, 0.02),  # 1 / (10 * 5)
    ],
)
def test_row_weights_by_hand(aggregation: str, first: float, second: float, empty: float):
    weights = row_weights(COUNTS, aggregation, num_tokens=8, num_rows=5, constant_length=10)
    torch.testing.assert_close(weights, torch.tensor([first, second, empty]))


def test_a_minibatch_without_trainable_tokens_has_finite_weights():
    nothing = torch.zeros(2, dtype=torch.int64)
    weights = {name: row_weights(nothing, name, num_tokens=0, num_rows=0, constant_length=4) for name in AGGREGATIONS}
    assert {name: each.tolist() for name, each in weights.items()} == {
        "token": [1.0, 1.0],
        "sequence": [1.0, 1.0],
        "constant": [0.25, 0.25],
    }


def test_wrong_aggregations_are_refused():
    with pytest.raises(ValueError, match=r"'mean'.*token, sequence, constant"):
        row_weights(COUNTS, "mean", num_tokens=8, num_rows=5)
    for length in (None, 0):
        with pytest.raises(ValueError, match="constant_length"):
            row_weights(COUNTS, "constant", num_tokens=8, num_rows=5, constant_length=length)


def slow_loss(losses: list[list[float]], aggregation: str, constant_length: int) -> float:
    """The definitions of the papers over ragged rows, without weights."""
    tokens = [loss for row in losses for loss in row]
    if aggregation == "token":
        return sum(tokens) / len(tokens)
    if aggregation == "sequence":
        return sum(sum(row) / len(row) for row in losses if row) / len(losses)
    return sum(sum(row) / constant_length for row in losses) / len(losses)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), aggregation=st.sampled_from(AGGREGATIONS))
def test_weights_realise_the_papers_means_over_ranks(data: st.DataObject, aggregation: str):
    losses = data.draw(st.lists(st.lists(st.floats(-5, 5, width=32), max_size=6), min_size=1, max_size=8).filter(any))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(losses), max_size=len(losses)))
    num_tokens = sum(map(len, losses))
    total = 0.0
    for rank in range(3):
        rows = [row for row, owner in zip(losses, owners, strict=True) if owner == rank]
        values = torch.tensor([row + [NAN] * (7 - len(row)) for row in rows]).reshape(-1, 7)
        mask = torch.tensor([[t < len(row) for t in range(7)] for row in rows], dtype=torch.bool).reshape(-1, 7)
        counts = mask.sum(1)
        per_row = row_weights(counts, aggregation, num_tokens=num_tokens, num_rows=len(losses), constant_length=9)
        total += weighted_sum(values, torch.where(mask, per_row[:, None], 0.0)).item()
    assert total == pytest.approx(slow_loss(losses, aggregation, 9), rel=1e-5, abs=1e-5)
