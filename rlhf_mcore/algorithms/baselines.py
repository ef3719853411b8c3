"""Advantages over baselines that are no mean of the group: one function per paper, registered as those of ``advantages``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.advantages import compare_outcomes, group_relative
from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator
from rlhf_mcore.algorithms.returns import discount_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


@advantage_estimator("opo")
def opo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Outcome minus the baseline of least variance: OPO (Hao et al. 2025, arXiv 2505.23585, eq. 8).

    A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, with the responses' lengths l in trainable tokens. The square of a
    response's gradient is taken to grow with its length.
    """
    lengths = inputs.rows.sums(torch.ones_like(inputs.rewards), inputs.loss_mask)
    of_responses = replace(cfg, turn_credit=False)
    return Advantages(compare_outcomes(inputs, of_responses, partial(_minus_mean_by_length, lengths=lengths)))


def _minus_mean_by_length(values: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    relative = group_relative(values, groups, normalize_std=False)  # equal values are exact zeros
    _, index = torch.unique(groups, return_inverse=True)
    zeros = lengths.new_zeros(len(groups))
    means = zeros.index_add(0, index, lengths * relative) / zeros.index_add(0, index, lengths).clamp(min=1)
    return relative - means[index]


@advantage_estimator("remax")
def remax(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Sum of the rewards from a token on, minus the greedy response's score: ReMax (Li et al. 2023, arXiv 2310.10505, algorithm 1).

    A_t = sum_k r_{t+k} - b, with the score b of the greedy response to the same prompt. b does not depend on what was sampled, so the
    gradient stays unbiased. The KL of the reward is in the r of the sampled response alone.
    """
    assert inputs.baselines is not None, "remax needs the scores of greedy responses"
    sums = discount_rewards(inputs, replace(cfg, gamma=1.0, turn_gamma=1.0, turn_credit=False))
    return Advantages(torch.where(inputs.loss_mask, sums - inputs.rows.to_tokens(inputs.baselines), 0).float())
