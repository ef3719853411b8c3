"""Attention whose sums have one order on CUDA: its passes run in torch's strict deterministic mode.

Elsewhere torch only warns, for not every operation has a deterministic kernel; then flash and memory-efficient attention add
gradients in any order (torch's ``attention_backward.cu``). In strict mode both have a fixed one, and cuDNN's attention, which has
none, is not chosen (``sdp_utils.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_in_fixed_order(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute ``scaled_dot_product_attention`` with its ``options``; a mask among them gets no gradient."""
    out: Tensor = _InFixedOrder.apply(partial(F.scaled_dot_product_attention, **options), query, key, value)
    return out


class _InFixedOrder(torch.autograd.Function):
    """A graph of its own around the attention, so that torch is strict in its backward pass and in no other operation's."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad(), _strict():
            ctx.out = attend(*ctx.inputs)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        learned = [x for x in ctx.inputs if x.requires_grad]
        with _strict():
            gradients = iter(torch.autograd.grad(ctx.out, learned, grads[0]))
        by_input = [next(gradients) if x.requires_grad else None for x in ctx.inputs]
        ctx.inputs = ctx.out = None  # the graph and what it keeps
        return None, *by_input


@contextmanager
def _strict() -> Iterator[None]:
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
