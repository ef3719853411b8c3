"""Compute ``linear_logprobs`` for given logits. The logits are the weight of an output layer whose inputs are unit vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.parallel.logprobs import Subsets, TokenLogprobs, linear_logprobs
from rlhf_mcore.types import Ragged


def given_logprobs(
    logits: Tensor, labels: Tensor, *, support: Ragged[Tensor] | None = None, **options: Any
) -> TokenLogprobs:
    """Return the logprobs in the shape of the labels. The gradient of the weight is the gradient of the logits, without rounding."""
    weight = logits.reshape(-1, logits.size(-1)).t()
    unit = torch.eye(weight.size(1), dtype=weight.dtype)
    subsets = None if support is None else Subsets.of(Ragged(support.counts.flatten(), support.values))
    found = linear_logprobs(unit, weight, labels.reshape(-1), support=subsets, **options)
    logprobs, *others = (None if values is None else values.view(labels.shape) for values in found)
    assert logprobs is not None
    return TokenLogprobs(logprobs, *others)
