"""Test the critic's loss and metrics: hand-worked values, slow loops, and masked values."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.algorithms.value_loss import ReturnNormalizer, explained_variance, explained_variance_sums, value_loss
from rlhf_mcore.config.errors import ConfigError
from tests.rows import everything

NAN, INF = float("nan"), float("inf")


def test_by_hand():
    # Returns 0, old values 1, clip 0.5. Value 0.25: unclipped 1/16, clipped to 1/2 it is 1/4, which is larger and has
    # no gradient.
    # Value 1.25: 25/16, within the bound. Value 2: 4 against (1.5)^2, and the larger has the gradient.
    values = torch.tensor([[0.25, 1.25, 2.0]], requires_grad=True)
    ones = torch.ones(1, 3)
    loss, metrics = value_loss(values, ones, torch.zeros(1, 3), ones / 4, clip=0.5)
    loss.backward()
    assert loss.item() == pytest.approx((0.25 + 1.5625 + 4.0) / 8)
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1.25, 2.0]]) / 4)
    assert metrics["clip_fraction"].item() == 1 and metrics["values"].item() == 3.5


def test_without_a_bound_it_is_the_squared_error():
    values = torch.tensor([[0.25, 5.0]], requires_grad=True)
    loss, metrics = value_loss(values, torch.zeros(1, 2), torch.ones(1, 2), torch.full((1, 2), 0.5), clip=None)
    loss.backward()
    assert loss.item() == pytest.approx((0.5625 + 16.0) / 4)
    torch.testing.assert_close(values.grad, torch.tensor([[-0.375, 2.0]]))
    assert metrics["clip_fraction"].item() == 0


def slow_value_loss(rows: list[tuple[float, float, float]], clip: float | None) -> float:
    total = 0.0
    for value, old, target in rows:
        error = (value - target) ** 2
        if clip is not None:
            step = min(max(value - old, -clip), clip)
            error = max(error, (old + step - target) ** 2)
        total += 0.5 * error / len(rows)
    return total


number = st.floats(-3, 3, width=32)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(number, number, number), min_size=1, max_size=8),
    clip=st.sampled_from([None, 0.2, 1.0]),
    garbage=st.sampled_from([NAN, INF, -INF, 1e30]),
)
def test_against_a_loop_with_garbage_in_padding(
    rows: list[tuple[float, float, float]], clip: float | None, garbage: float
):
    padded = torch.tensor([[*rows, (garbage, -garbage, garbage)]])
    values, old, returns = (part.contiguous() for part in padded.unbind(-1))
    values.requires_grad_()
    weights = torch.full(values.shape, 1 / len(rows))
    weights[0, -1] = 0.0
    loss, metrics = value_loss(values, old, returns, weights, clip)
    loss.backward()
    assert loss.item() == pytest.approx(slow_value_loss(rows, clip), rel=1e-4, abs=1e-6)
    assert values.grad is not None and values.grad[0, -1] == 0 and values.grad.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values())


def flat_sums(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    return explained_variance_sums(values.flatten(), returns.flatten(), mask.flatten(), everything(values))


def take_in(made: ReturnNormalizer, returns: Tensor, mask: Tensor) -> None:
    made.update(returns.flatten(), mask.flatten(), everything(returns))


def compute_explained_variance(values: list[float], returns: list[float]) -> float:
    padded = torch.tensor([[*values, NAN]]), torch.tensor([[*returns, NAN]])
    mask = torch.tensor([[True] * len(values) + [False]])
    return explained_variance(flat_sums(*padded, mask))


def test_explained_variance_by_hand():
    assert compute_explained_variance([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0
    assert compute_explained_variance([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(0.0)
    assert compute_explained_variance([5.0, 6.0, 7.0], [1.0, 2.0, 3.0]) == pytest.approx(
        1.0
    )  # a constant offset has no variance
    assert compute_explained_variance([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]) == pytest.approx(-3.0)  # errors -2, 0, 2: 1 - 4
    assert compute_explained_variance([1.0, 2.0], [0.1, 0.1]) == 0.0  # no variance to explain
    assert compute_explained_variance([], []) == 0.0


@settings(max_examples=20, deadline=None)
@given(pairs=st.lists(st.tuples(number, number), min_size=2, max_size=12), cut=st.integers(0, 12))
def test_explained_variance_from_sums_over_parts(pairs: list[tuple[float, float]], cut: int):
    variance = statistics.pvariance([r for _, r in pairs])
    errors = statistics.pvariance([r - v for v, r in pairs])
    sums: dict[str, float] = {}
    for part in (pairs[:cut], pairs[cut:]):
        values, returns = torch.tensor([v for v, _ in part]), torch.tensor([r for _, r in part])
        local = flat_sums(values[None], returns[None], torch.ones(1, len(part), dtype=torch.bool))
        sums = {name: sums.get(name, 0.0) + value for name, value in local.items()}
    if variance > 1e-6:
        assert explained_variance(sums) == pytest.approx(1 - errors / variance, rel=1e-6, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.lists(number, max_size=6), min_size=1, max_size=5))
def test_a_normalizer_has_the_moments_of_everything_it_has_seen(steps: list[list[float]]):
    made, seen = ReturnNormalizer(), [x for step in steps for x in step]
    for step in steps:
        take_in(made, torch.tensor([[*step, NAN]]), torch.tensor([[True] * len(step) + [False]]))
    if not seen or statistics.pvariance(seen) < 1e-9:
        return
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    expected = (x - statistics.fmean(seen)) / statistics.pstdev(seen)
    torch.testing.assert_close(made.normalize(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.denormalize(made.normalize(x)), x)
    again = ReturnNormalizer()
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again == made


def test_a_normalizer_that_has_seen_nothing_or_no_variance():
    made, x = ReturnNormalizer(), torch.tensor([3.0])
    assert made.normalize(x).item() == made.denormalize(x).item() == 3.0
    take_in(made, torch.full((2, 2), 5.0), torch.ones(2, 2).bool())
    assert made.normalize(x).item() == -2.0 and math.isclose(made.deviation, 1.0)
    with pytest.raises(ConfigError, match="return normalizer"):
        made.load_state_dict({"count": 1.0})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("wild", [3e38, -3e38, float("inf"), NAN])
def test_one_wild_return_does_not_decide_what_the_others_are_divided_by(first: bool, wild: float):
    usual = torch.tensor([[0.0], [1.0]] * 50)  # a hundred responses
    mask = torch.ones_like(usual, dtype=torch.bool)
    hit = usual.clone()
    hit[17] = wild
    made = ReturnNormalizer()
    for number in range(20):
        take_in(made, hit if number == (0 if first else 19) else usual, mask)
    # 100 values of a spread of at most 1 among 2000 returns of mean 1/2 move the mean by at most 0.05, and the
    # variance by 100^2 / 2000 = 5.
    assert made.mean == pytest.approx(0.5, abs=0.06) and 0.4 < made.deviation < 2.4
    assert made.normalize(usual).abs().max() < 3


def test_returns_of_any_size_are_taken_as_they_are():
    made = ReturnNormalizer()
    take_in(made, torch.tensor([[0.0], [1e6], [2e6], [3e6]]), torch.ones(4, 1).bool())
    assert made.mean == 1.5e6 and made.deviation == pytest.approx(math.sqrt(1.25) * 1e6)
