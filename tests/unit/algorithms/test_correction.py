"""The distance between the engine's logprobs and the trainer's."""

from __future__ import annotations

import math

import torch

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics

NAN = float("nan")


def test_by_hand():
    old = torch.tensor([[NAN, -1.0, -2.0], [-3.0, NAN, NAN]])
    rollout = torch.tensor([[0.0, -1.25, -1.5], [-3.0, 0.0, NAN]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    statistics = rollout_ratio_statistics(old, rollout, mask)
    # |-1 + 1.25| + |-2 + 1.5| + 0 = 0.75, the largest of them 0.5
    assert {name: value.item() for name, value in statistics.items()} == {
        "logprob_diff_sum": 0.75,
        "logprob_diff_max": 0.5,
        "num_tokens": 3.0,
    }


def test_an_empty_mask_gives_zeros():
    statistics = rollout_ratio_statistics(torch.full((2, 2), NAN), torch.zeros(2, 2), torch.zeros(2, 2).bool())
    assert [value.item() for value in statistics.values()] == [0.0, 0.0, 0.0]


def test_a_nan_inside_the_mask_shows():
    statistics = rollout_ratio_statistics(torch.tensor([NAN, -1.0]), torch.tensor([-1.0, -1.0]), torch.ones(2).bool())
    assert math.isnan(statistics["logprob_diff_sum"].item())
    assert math.isnan(statistics["logprob_diff_max"].item())


def test_half_precision_and_gradients():
    old = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    statistics = rollout_ratio_statistics(old, torch.tensor([-1.001, -2.0]), torch.ones(2).bool())
    assert abs(statistics["logprob_diff_max"].item() - 0.001) < 1e-6
    assert not statistics["logprob_diff_sum"].requires_grad
