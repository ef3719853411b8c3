"""Where a score and the KL penalty land."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.shaping import token_rewards

NAN = float("nan")
# Trainable: tokens 1-2; tokens 1 and 3 (a gap, as a tool's output leaves it); none; all.
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def test_a_score_lands_on_the_last_trainable_token():
    rewards = token_rewards(torch.tensor([1.0, -2.0, NAN, 0.5]), MASK)
    assert rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, -2], [0, 0, 0, 0], [0, 0, 0, 0.5]]


def test_kl_is_charged_on_trainable_tokens_only():
    kl = torch.tensor([[NAN, 2.0, 4.0, NAN], [NAN, 1.0, NAN, 1.0], [NAN] * 4, [0.0, 0.0, 0.0, -1.0]])
    rewards = token_rewards(torch.tensor([1.0, -2.0, 3.0, 0.5]), MASK, kl, kl_coef=0.25)
    # Row 1: -0.25 * 2 = -0.5, 1 - 0.25 * 4 = 0. Row 2: -0.25, -2 - 0.25. Row 4: 0.5 + 0.25.
    assert rewards.tolist() == [[0, -0.5, 0, 0], [0, -0.25, 0, -2.25], [0, 0, 0, 0], [0, 0, 0, 0.75]]


def test_coefficient_zero_ignores_even_an_infinite_kl():
    rewards = token_rewards(torch.ones(4), MASK, torch.full((4, 4), float("inf")), kl_coef=0.0)
    assert rewards.sum().item() == 3.0


def test_a_coefficient_without_kl_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0.1"):
        token_rewards(torch.ones(4), MASK, kl_coef=0.1)


def test_no_rows_and_no_tokens():
    assert token_rewards(torch.zeros(0), torch.zeros(0, 3, dtype=torch.bool)).shape == (0, 3)
    assert token_rewards(torch.zeros(2), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


@settings(max_examples=50, deadline=None)
@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6), data=st.data())
def test_against_a_loop(mask: list[list[bool]], data: st.DataObject):
    number = st.floats(-3, 3, width=32)
    scores = data.draw(st.lists(number, min_size=len(mask), max_size=len(mask)))
    kl = [data.draw(st.lists(number, min_size=5, max_size=5)) for _ in mask]
    rewards = token_rewards(torch.tensor(scores), torch.tensor(mask), torch.tensor(kl), kl_coef=0.5)
    for i, row in enumerate(mask):
        for t, trainable in enumerate(row):
            expected = -0.5 * kl[i][t] if trainable else 0.0
            if trainable and not any(row[t + 1 :]):
                expected += scores[i]
            assert rewards[i, t].item() == pytest.approx(expected, abs=1e-6)
