"""Slow versions of Transformer Engine's AdamW kernels (transformer_engine/common/multi_tensor/adam.cu, release 2.17).

A stand-in for a kernel takes the kernel's arguments. Its ``lists`` are lists of gradients, weights, first and second moments, and
(with remainders) int16 remainders. All arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def join(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return the masters of bf16 weights [n] and int16 remainders [n], half by half as the kernel does."""
    halves = torch.stack([remainders, weights.view(torch.int16) - (remainders < 0).to(torch.int16)], dim=-1)
    return halves.flatten().view(torch.float32)  # little-endian: the low half is first


def split(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Return bf16 weights and int16 remainders of masters [n]. A negative low half rounds the high half up."""
    low, high = masters.contiguous().view(torch.int16).view(-1, 2).unbind(-1)
    return (high + (low < 0).to(torch.int16)).view(torch.bfloat16), low.clone()


def update(grad: Tensor, master: Tensor, first: Tensor, second: Tensor, settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return master and moments after AdamW's step number ``step``. All tensors are fp32."""
    lr, beta1, beta2, eps, step, decoupled, corrects, decay = settings
    assert decoupled == corrects == 1
    first = beta1 * first + (1 - beta1) * grad
    second = beta2 * second + (1 - beta2) * grad * grad
    change = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps) + decay * master
    return master - lr * change, first, second


def adam(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *settings: Any) -> None:
    """Step fp32 weights, or masters if there is a fifth list. Moments may be bf16."""
    for grad, weights, first, second, *master in zip(*lists, strict=True):
        stepped = master[0] if master else weights
        new = update(grad.float(), stepped, first.float(), second.float(), settings)
        for tensor, value in zip((stepped, first, second), new, strict=True):
            tensor.copy_(value)
        weights.copy_(stepped)


def adam_param_remainder(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *settings: Any) -> None:
    """Step bf16 weights with remainders."""
    for grad, weights, first, second, remainders in zip(*lists, strict=True):
        master, *moments = update(grad.float(), join(weights, remainders), first.float(), second.float(), settings)
        for tensor, value in zip((weights, remainders, first, second), (*split(master), *moments), strict=True):
            tensor.copy_(value)


def l2norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().reshape(1), None


def scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)
