"""Norm, gated activation and rotation in fp32 on a CPU, in blocks of tokens that fit its cache.

Plain torch reads and writes all tokens in memory once per operation, and saves each result for the backward pass.
These kernels run all operations on one block before the next, and save only their inputs. Other dtypes use plain
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_BYTES = 2**18  # bytes of the largest tensor of an operation; a core's cache holds several such blocks


def has_kernel(x: Tensor) -> bool:
    """Return whether this module computes ``x``."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension, all in fp32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    rows: Tensor = _RMSNorm.apply(x.reshape(-1, x.size(-1)), weight, eps)
    return rows.view(x.shape)


def swiglu(x: Tensor, bias: Tensor | None = None, *args: Any) -> Tensor:
    """Compute silu(a) * b of [..., (a, b)].

    Replaces Megatron's ``bias_swiglu_impl``; further arguments are for other devices.
    """
    x = x if bias is None else x + bias
    if not has_kernel(x):
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b
    rows: Tensor = _SwiGLU.apply(x.reshape(-1, x.size(-1)))
    return rows.view(*x.shape[:-1], rows.size(-1))


def weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *args: Any) -> Tensor:
    """Compute ``swiglu`` times ``weights`` [..., 1]. Replaces Megatron's ``weighted_bias_swiglu_impl``."""
    return (swiglu(x, bias) * weights).to(x.dtype)


def rotation(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that replaces Megatron's rotation of heads by position.

    ``plain`` is Megatron's function. It is used for other dtypes, partial rotation and interleaved pairs.
    """

    @wraps(plain)
    def rotate(t: Tensor, freqs: Tensor, *turns: bool, mscale: float = 1.0, **kinds: bool) -> Tensor:
        """Rotate ``t`` [s, b, heads, dim] by ``freqs`` [s, 1, 1, dim], whose halves are equal."""
        if not has_kernel(t) or t.size(-1) != freqs.size(-1) or any(turns) or any(kinds.values()):
            return plain(t, freqs, *turns, mscale=mscale, **kinds)
        angles = freqs[..., : freqs.size(-1) // 2]
        rotated: Tensor = _Rotation.apply(t, angles.cos() * mscale, angles.sin() * mscale)
        return rotated

    return rotate


class _RMSNorm(torch.autograd.Function):
    """Normalise rows.

    With n = x / rms(x): dL/dx = (g w - n mean(g w n)) / rms(x), dL/dw = sum over rows of g n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.empty_like(x), x.new_empty(len(x), 1)
        for rows, to, by in _blocks(x, out, scale):
            torch.mean(rows * rows, -1, keepdim=True, out=by).add_(eps).rsqrt_()
            torch.mul(rows, by, out=to).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        out, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for rows, g, to, by in _blocks(x, grad, out, scale):
            normed = rows * by
            grad_weight += torch.mul(g, normed, out=to).sum(0)
            mean = torch.mv(to, weight).div_(x.size(1))
            torch.mul(g, weight, out=to).addcmul_(normed, mean[:, None], value=-1).mul_(by)
        return out, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    """Compute ``swiglu`` of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.size(1) // 2)
        for rows, to in _blocks(x, out):
            a, b = rows.chunk(2, dim=1)
            torch.mul(F.silu(a), b, out=to)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        out = torch.empty_like(x)
        for rows, g, to in _blocks(x, grad, out):
            (a, b), (to_a, to_b) = rows.chunk(2, dim=1), to.chunk(2, dim=1)
            torch.mul(F.silu(a), g, out=to_b)
            torch.ops.aten.silu_backward.grad_input(g * b, a, grad_input=to_a)
        return out


class _Rotation(torch.autograd.Function):
    """Rotate the pairs (a, b) of a head's halves. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    for rows, to, c, s in _blocks(x, out, cos, sin):
        (a, b), (to_a, to_b) = rows.chunk(2, dim=-1), to.chunk(2, dim=-1)
        torch.mul(a, c, out=to_a).addcmul_(b, s, value=-1)
        torch.mul(b, c, out=to_b).addcmul_(a, s)
    return out


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors with the same number of rows into blocks of rows. The first tensor is the largest."""
    rows = max(_BLOCK_BYTES // (tensors[0].element_size() * max(math.prod(tensors[0].shape[1:]), 1)), 1)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
