"""How far the trainer's logprobs are from those of the engine that sampled the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.kl import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def rollout_ratio_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Statistics of |log rollout_ratio| = |old_logprobs - rollout_logprobs| over the tokens in ``mask``.

    All three inputs have one shape. The results are local float scalars, zero for an empty mask: the caller adds
    ``logprob_diff_sum`` and ``num_tokens`` over ranks and takes the largest ``logprob_diff_max``. A NaN inside the
    mask shows.
    """
    differences = (at_least_float32(old_logprobs[mask]) - at_least_float32(rollout_logprobs[mask])).abs()
    return {
        "logprob_diff_sum": differences.sum(),
        "logprob_diff_max": differences.max() if differences.numel() else differences.new_zeros(()),
        "num_tokens": differences.new_tensor(differences.numel()),
    }
