"""Build inputs of losses for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_mcore.algorithms.covariance import CHOSEN
from rlhf_mcore.algorithms.interfaces import LossInputs


def loss_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, sequence_ids: Tensor | None = None
) -> LossInputs:
    """Return inputs of a loss. Each row is a sequence, unless ``sequence_ids`` are given. Tokens of weight 0 are not trainable.

    No token is selected for its covariance.
    """
    if sequence_ids is None:
        sequence_ids = torch.arange(len(logprobs))[:, None].expand(logprobs.shape)
    num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    mask, fields = weights > 0, {CHOSEN: torch.zeros(weights.shape, dtype=torch.bool)}
    return LossInputs(logprobs, old_logprobs, advantages, mask, weights, sequence_ids, num_sequences, fields)
