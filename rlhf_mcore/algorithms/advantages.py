"""Advantage estimators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def group_relative(outcomes: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Advantage of each response relative to the other responses to the same prompt.

    With mean and std over the outcomes r of the group of i:

    - ``normalize_std``: (r_i - mean) / (std + eps)   (GRPO, arXiv 2402.03300, section 4.1.2). The paper does not say
      which standard deviation; as in the usual implementations it is the sample one, with G - 1 in the denominator;
    - otherwise: r_i - mean   (Dr. GRPO, arXiv 2503.20783, section 3.2), which is 0 for a group of one.

    Outcomes that are all equal give exactly zero. A NaN outcome makes its own group NaN and no other.

    Args:
        outcomes: [B] total reward of each response. Every group must be here whole.
        group_ids: [B] int64, equal for the responses to one prompt, in any order.

    Returns:
        [B], at least float32.

    Raises:
        ValueError: ``normalize_std`` with a group of one, which has no standard deviation.
    """
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if normalize_std and bool((counts < 2).any()):
        lonely = group_ids[(counts < 2)[index]][0].item()
        raise ValueError(
            f"group {lonely} has a single response, so its standard deviation is undefined: "
            "sample at least 2 responses per prompt, or switch normalize_std off"
        )
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=outcomes.device)
    wide = outcomes.double()
    # Relative to the group's smallest outcome, equal outcomes are exact zeros whatever their value.
    wide = wide - zeros.scatter_reduce(0, index, wide, "amin", include_self=False)[index]
    deviations = wide - (zeros.index_add(0, index, wide) / counts)[index]
    if normalize_std:
        variances = zeros.index_add(0, index, deviations.square()) / (counts - 1)
        deviations = deviations / (variances.sqrt()[index] + eps)
    return deviations.to(torch.promote_types(outcomes.dtype, torch.float32))


def broadcast_to_tokens(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Give every token in the bool mask [B, T] its row's advantage from [B]: [B, T], zero outside the mask."""
    return torch.where(loss_mask, advantages.unsqueeze(1), 0)
