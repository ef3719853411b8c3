"""Test the tokens that receive the score and the KL penalty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.algorithms.advantages import group_relative, groups_that_differ
from rlhf_mcore.algorithms.returns import overlong_penalty, token_rewards
from tests.rows import everything

NAN = float("nan")
# Trainable: tokens 1-2; tokens 1 and 3 (with a gap, as after a tool's output); no token; all tokens.
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def place_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return the token rewards of tensors [B, T]."""
    flat = kl.flatten() if kl is not None else None
    return token_rewards(scores, mask.flatten(), everything(mask), flat, kl_coef).view_as(mask)


def test_a_score_lands_on_the_last_trainable_token():
    rewards = place_rewards(torch.tensor([1.0, -2.0, NAN, 0.5]), MASK)
    assert rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, -2], [0, 0, 0, 0], [0, 0, 0, 0.5]]


def test_kl_is_charged_on_trainable_tokens_only():
    kl = torch.tensor([[NAN, 2.0, 4.0, NAN], [NAN, 1.0, NAN, 1.0], [NAN] * 4, [0.0, 0.0, 0.0, -1.0]])
    rewards = place_rewards(torch.tensor([1.0, -2.0, 3.0, 0.5]), MASK, kl, kl_coef=0.25)
    # Row 1: -0.25 * 2 = -0.5, 1 - 0.25 * 4 = 0. Row 2: -0.25, -2 - 0.25. Row 4: 0.5 + 0.25.
    assert rewards.tolist() == [[0, -0.5, 0, 0], [0, -0.25, 0, -2.25], [0, 0, 0, 0], [0, 0, 0, 0.75]]


def test_coefficient_zero_ignores_even_an_infinite_kl():
    rewards = place_rewards(torch.ones(4), MASK, torch.full((4, 4), float("inf")), kl_coef=0.0)
    assert rewards.sum().item() == 3.0


def test_a_coefficient_without_kl_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0.1"):
        place_rewards(torch.ones(4), MASK, kl_coef=0.1)


def test_no_rows_and_no_tokens():
    assert place_rewards(torch.zeros(0), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert place_rewards(torch.zeros(2), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


@settings(max_examples=25, deadline=None)
@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6), data=st.data())
def test_against_a_loop(mask: list[list[bool]], data: st.DataObject):
    number = st.floats(-3, 3, width=32)
    scores = data.draw(st.lists(number, min_size=len(mask), max_size=len(mask)))
    kl = [data.draw(st.lists(number, min_size=5, max_size=5)) for _ in mask]
    rewards = place_rewards(torch.tensor(scores), torch.tensor(mask), torch.tensor(kl), kl_coef=0.5)
    for i, row in enumerate(mask):
        for t, trainable in enumerate(row):
            expected = -0.5 * kl[i][t] if trainable else 0.0
            if trainable and not any(row[t + 1 :]):
                expected += scores[i]
            assert rewards[i, t].item() == pytest.approx(expected, abs=1e-6)


def test_rewards_of_a_row_add_up_to_its_score_with_rewards_of_turns():
    mask = torch.tensor([[False, True, True, False, True], [True, True, False, True, True]])
    turns = torch.tensor(
        [[0.0, 0.0, 0.25, 9.0, 0.0], [0.0, -0.5, 9.0, 0.0, 0.0]]
    )  # 9: not written by the policy, so not trained on
    found = token_rewards(torch.tensor([1.0, -2.0]), mask.flatten(), everything(mask), turn_rewards=turns.flatten())
    assert found.view_as(mask).tolist() == [[0, 0, 0.25, 0, 0.75], [0, -0.5, 0, 0, -1.5]]


def test_overlong_penalty_by_hand():
    # Equation 13 with a limit of 20 and a cache of 8: no penalty up to 12, then an eighth per token, and the full
    # penalty from 20 on.
    lengths = torch.tensor([0, 12, 13, 16, 20, 25])
    assert overlong_penalty(lengths, max_tokens=20, cache_tokens=8).tolist() == [0, 0, -0.125, -0.5, -1, -1]
    assert overlong_penalty(lengths, 20, 8, penalty=4.0).tolist() == [0, 0, -0.5, -2, -4, -4]
    assert overlong_penalty(torch.tensor([0, 10, 20]), 20, 20).tolist() == [0, -0.5, -1]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(0, 60), limit=st.integers(1, 50), data=st.data())
def test_overlong_penalty_against_the_papers_cases(length: int, limit: int, data: st.DataObject):
    cache = data.draw(st.integers(1, limit))
    if length <= limit - cache:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - cache) - length) / cache
    else:
        expected = -1.0
    assert overlong_penalty(torch.tensor([length]), limit, cache).item() == pytest.approx(expected)


def test_groups_that_differ_by_hand():
    scores = torch.tensor([1.0, 0.5, 1.0, 0.5, 2.0, 7.0])
    group_ids = torch.tensor([3, 1, 3, 1, 1, 0])  # 3: equal scores, 1: different scores, 0: a single response
    assert groups_that_differ(scores, group_ids).tolist() == [False, True, False, True, True, False]
    assert groups_that_differ(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_a_group_differs_exactly_where_its_advantages_do():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 2, (200,), generator=generator).float()
    group_ids = torch.randint(0, 60, (200,), generator=generator)
    advantages = group_relative(scores, group_ids, normalize_std=False)
    assert torch.equal(groups_that_differ(scores, group_ids), advantages != 0)
