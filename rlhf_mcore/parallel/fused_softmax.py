"""Compute sums and gradients over a chunk of logits on CUDA, with kernels that read the logits once or twice.

Plain torch would write intermediate results to memory: fp32 logits, logits relative to the largest, exponentials and
products. torch.compile turns each function here into one kernel. Called without it, the functions compute the same on
any device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlhf_mcore.parallel.logprobs import Wanted, _Columns


@cache
def can_compile() -> bool:
    """Return whether torch can compile GPU kernels here. This requires Triton and a C compiler for launchers.

    If torch.compile is disabled, return False, because the plain functions use more memory than torch's in-place
    operations.
    """
    if "1" in (os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE")):
        return False
    return find_spec("triton") is not None and any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # The numbers of tokens and columns are kernel arguments, so one kernel serves all chunks.
    return torch.compile(function, dynamic=True)


def sum_rows(logits: Tensor, columns: _Columns, wanted: Wanted) -> list[Tensor]:
    """Compute the same as ``_sum_rows`` of ``logprobs.py``, without a support or a teacher."""
    compute = _compile(_sums_with_entropy if wanted[0] else _sums)
    return list(compute(columns.width, columns.temperature, logits))


def overwrite_by_gradient(
    logits: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
    wanted: Wanted,
) -> None:
    """Do the same as ``_overwrite_by_gradient`` of ``logprobs.py``, without a support or a teacher."""
    grad_logprobs, grad_entropy, *_ = grads
    peak, log_sum, entropy, *_ = sums
    assert peak is not None and log_sum is not None
    places, here = columns.local(labels, logits.size(1))
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum)
    arguments = logits, peak, log_sum, torch.where(here, places, -1), grad_logprobs
    if grad_entropy is not None:
        arguments += (grad_entropy, entropy)  # type: ignore[assignment]
    function = _gradient if grad_entropy is None else _gradient_with_entropy
    _compile(function)(columns.width, columns.temperature, *arguments)


def _scale(logits: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return scaled logits in fp32, -inf for padding, and the column numbers."""
    numbers = torch.arange(logits.size(1), device=logits.device)
    return torch.where(numbers < width, logits.float() / temperature, -torch.inf), numbers


def _sums(width: int, temperature: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    z, _ = _scale(logits, width, temperature)
    peak = z.amax(1).clamp_min(torch.finfo(z.dtype).min)  # finite even if all columns are padding
    return peak, (z - peak[:, None]).exp().sum(1)


def _sums_with_entropy(width: int, temperature: float, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z, _ = _scale(logits, width, temperature)
    peak = z.amax(1).clamp_min(torch.finfo(z.dtype).min)
    relative = z - peak[:, None]
    weights = relative.exp()
    return peak, weights.sum(1), (weights * torch.where(weights > 0, relative, 0.0)).sum(1)


def _gradient(
    width: int, temperature: float, logits: Tensor, peak: Tensor, log_sum: Tensor, at_label: Tensor, of_logprobs: Tensor
) -> None:
    z, numbers = _scale(logits, width, temperature)
    # Subtract in this order, so that an offset that all logits share costs no precision.
    p = ((z - peak[:, None]) - log_sum[:, None]).exp()
    grad = torch.where(numbers == at_label[:, None], of_logprobs[:, None], 0.0) - p * of_logprobs[:, None]
    logits.copy_(grad / temperature)


def _gradient_with_entropy(
    width: int,
    temperature: float,
    logits: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    at_label: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor,
    entropy: Tensor,
) -> None:
    z, numbers = _scale(logits, width, temperature)
    log_p = (z - peak[:, None]) - log_sum[:, None]
    p = log_p.exp()
    # Padding has p = 0 and log p = -inf, whose product must be 0.
    surprise = torch.where(p > 0, log_p, 0.0) + entropy[:, None]
    grad = torch.where(numbers == at_label[:, None], of_logprobs[:, None], 0.0)
    grad = grad - p * (of_logprobs[:, None] + of_entropy[:, None] * surprise)
    logits.copy_(grad / temperature)
