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
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from rlhf_mcore.parallel.logprobs import _Columns


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


def forward_chunk(logits: Tensor, labels: Tensor, columns: _Columns, with_entropy: bool) -> list[Tensor]:
    """Compute the same as ``_forward_chunk`` of ``logprobs.py``, from logits [n, V_local] of any dtype.

    The logits do not change.
    """
    compute = _compile(_sums_with_entropy if with_entropy else _sums)
    peak, *sums = compute(columns.width, columns.temperature, logits)
    if columns.is_shared(logits):
        own = peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        # Convert sums relative to this rank's largest logit to sums relative to the largest of all ranks. For padding
        # alone they are zero.
        offset = (own - peak).clamp_min(-1e30)
        sums = [offset.exp() * x for x in (sums[0], *(s + sums[0] * offset for s in sums[1:]))]
    places, here = columns.local(labels, logits.size(1))
    target = logits.gather(1, places[:, None]).squeeze(1).float() / columns.temperature - peak
    together = torch.stack([torch.where(here, target, 0.0), *sums])
    if columns.is_shared(logits):
        dist.all_reduce(together, group=columns.group)
    return [together[0], together[1].log(), peak, *([together[2] / together[1]] if with_entropy else [])]


def compute_gradient(
    logits: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
) -> Tensor:
    """Compute the gradient [n, V_local] of logits in their dtype, rounded once, from the sums of ``forward_chunk``."""
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
    gradient: Tensor = _compile(function)(columns.width, columns.temperature, *arguments)
    return gradient


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
) -> Tensor:
    z, numbers = _scale(logits, width, temperature)
    # Subtract in this order, so that an offset that all logits share costs no precision.
    p = ((z - peak[:, None]) - log_sum[:, None]).exp()
    grad = torch.where(numbers == at_label[:, None], of_logprobs[:, None], 0.0) - p * of_logprobs[:, None]
    return (grad / temperature).to(logits.dtype)


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
) -> Tensor:
    z, numbers = _scale(logits, width, temperature)
    log_p = (z - peak[:, None]) - log_sum[:, None]
    p = log_p.exp()
    # Padding has p = 0 and log p = -inf, whose product must be 0.
    surprise = torch.where(p > 0, log_p, 0.0) + entropy[:, None]
    grad = torch.where(numbers == at_label[:, None], of_logprobs[:, None], 0.0)
    grad = grad - p * (of_logprobs[:, None] + of_entropy[:, None] * surprise)
    return (grad / temperature).to(logits.dtype)
