"""Inputs of losses for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_mcore.algorithms.interfaces import LossInputs


def loss_inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, sequence_ids: Tensor | None = None
) -> LossInputs:
    """Each row is a sequence of its own, unless the ids say otherwise. Tokens of weight 0 are not trainable."""
    if sequence_ids is None:
        sequence_ids = torch.arange(len(logprobs))[:, None].expand(logprobs.shape)
    num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    return LossInputs(logprobs, old_logprobs, advantages, weights > 0, weights, sequence_ids, num_sequences)
