"""Advantages of scores that have several parts, each compared for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.advantages import broadcast_to_tokens, group_relative, outcomes
from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import AlgorithmConfig


@advantage_estimator("gdpo")
def gdpo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Normalise each part of a score in its group, then their sum over the step: GDPO (Liu et al. 2026, arXiv 2601.05242, eq. 4-6).

    A^k_i = (r^k_i - mean r^k) / (std r^k + eps) over the group of i, for each part k of the score
    S_i   = sum_k ``reward_weights``_k A^k_i
    A_i   = (S_i - mean S) / (std S + eps) over all responses of the step

    So parts count by their weights whatever their ranges, and responses with equal sums of unequal parts differ. Standard
    deviations are as in :func:`~rlhf_mcore.algorithms.advantages.group_relative`; without ``normalize_std`` the first is left out.
    Where the step has no parts, the whole score is the only one.
    """
    if inputs.score_parts is None:
        parts, weights = outcomes(inputs)[:, None], [1.0]
    else:
        parts, weights = inputs.score_parts, list((cfg.reward_weights or {}).values())
    groups = inputs.group_ids
    relative = [group_relative(part, groups, cfg.normalize_std) for part in parts.unbind(1)]
    sums = torch.stack([weight * part for weight, part in zip(weights, relative, strict=True)]).sum(0)
    of_responses = group_relative(sums, torch.zeros_like(groups), normalize_std=True) if len(sums) else sums
    return Advantages(broadcast_to_tokens(of_responses, inputs))
