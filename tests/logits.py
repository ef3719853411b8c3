"""``linear_logprobs`` of logits that are given: the output layer that makes them of unit vectors has them as its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.parallel.logprobs import linear_logprobs


def given_logprobs(logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Logprobs and entropy in the shape of the labels; the gradient of the weight is that of the logits, without a rounding."""
    weight = logits.reshape(-1, logits.size(-1)).t()
    unit = torch.eye(weight.size(1), dtype=weight.dtype)
    logprobs, entropy = linear_logprobs(unit, weight, labels.reshape(-1), **options)
    return logprobs.view(labels.shape), None if entropy is None else entropy.view(labels.shape)
