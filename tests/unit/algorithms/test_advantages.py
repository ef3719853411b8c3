"""Group-relative advantages: literals, and properties that hold for any rewards."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.advantages import broadcast_to_tokens, group_relative
from tests.messages import expect_error
from tests.rows import advantage_inputs

NAN = float("nan")


def test_grpo_by_hand():
    # Group 7: 1, 0, 0, 1. Mean 1/2; sample variance 4 * (1/2)^2 / 3 = 1/3; (1 - 1/2) * sqrt(3) = 0.8660254.
    # Group 2: 1, 2, 3. Mean 2; sample variance (1 + 0 + 1) / 2 = 1; -1, 0, 1. The groups are interleaved.
    outcomes = torch.tensor([1.0, 1.0, 0.0, 2.0, 0.0, 3.0, 1.0])
    group_ids = torch.tensor([7, 2, 7, 2, 7, 2, 7])
    half_root = math.sqrt(3) / 2
    expected = torch.tensor([half_root, -1, -half_root, 0, -half_root, 1, half_root])
    torch.testing.assert_close(group_relative(outcomes, group_ids, True), expected, rtol=1e-5, atol=1e-6)


def test_dr_grpo_by_hand():
    outcomes = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    group_ids = torch.tensor([0, 0, 0, 0, 1])
    # 1 - 1/2, 0 - 1/2, ...; a group of one: 5 - 5.
    assert group_relative(outcomes, group_ids, False).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]


def test_eps_is_added_to_the_standard_deviation():
    # Deviations -1, 1; sample std sqrt(2); eps 1: 1 / (1.41421356 + 1) = 0.41421356
    advantages = group_relative(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), True, eps=1.0)
    torch.testing.assert_close(advantages, torch.tensor([-0.41421356, 0.41421356]))


def test_a_group_of_one_has_no_standard_deviation():
    with expect_error(ValueError, value=("group 4", 2)):
        group_relative(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 4, 3]), True)


def test_a_nan_outcome_stays_in_its_group():
    advantages = group_relative(torch.tensor([NAN, 1.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1]), False)
    assert advantages.isnan().tolist() == [True, True, False, False]
    assert advantages[2:].tolist() == [-1.0, 1.0]


def test_no_rows():
    assert group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64), True).shape == (0,)


@given(value=st.floats(-1e6, 1e6), sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4), std=st.booleans())
@settings(max_examples=30, deadline=None)
def test_equal_outcomes_give_exactly_zero(value: float, sizes: list[int], std: bool):
    group_ids = torch.cat([torch.full((size,), index) for index, size in enumerate(sizes)])
    for dtype in (torch.float32, torch.float64):
        outcomes = torch.full((len(group_ids),), value, dtype=dtype) + group_ids
        assert group_relative(outcomes, group_ids, std).eq(0).all()


groups = st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=6), min_size=1, max_size=5)


@given(groups=groups, std=st.booleans(), data=st.data())
@settings(max_examples=30, deadline=None)
def test_against_a_loop_in_any_order(groups: list[list[float]], std: bool, data: st.DataObject):
    samples = []
    for group_id, outcomes in enumerate(groups):
        scale = statistics.stdev(outcomes) + 1e-6 if std else 1.0  # stdev: n - 1
        samples += [(group_id, r, (r - statistics.mean(outcomes)) / scale) for r in outcomes]
    samples = data.draw(st.permutations(samples))
    advantages = group_relative(torch.tensor([s[1] for s in samples]), torch.tensor([s[0] for s in samples]), std)
    torch.testing.assert_close(advantages, torch.tensor([s[2] for s in samples]), rtol=1e-4, atol=1e-5)


def test_broadcast_by_hand():
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    nothing = torch.zeros(3, dtype=torch.int64)
    made = advantage_inputs(torch.zeros(3, 3), mask, nothing, nothing.bool())
    tokens = broadcast_to_tokens(torch.tensor([2.0, NAN, -1.0]), made)
    assert tokens.view(3, 3).tolist() == [[0, 2, 2], [0, 0, 0], [-1, 0, -1]]
