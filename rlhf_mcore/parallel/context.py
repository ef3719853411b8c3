"""Context parallelism: how the ranks of a group share the tokens of every sequence, and how they get all of them back.

A sequence is cut into 2 * cp chunks of equal length, of which rank r has the chunks r and 2 * cp - 1 - r. So all ranks attend to
equally much under a causal mask. Sequences that are packed are cut one by one, as Megatron and Transformer Engine expect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of(rank: int, cp: int) -> tuple[int, int]:
    """Numbers of the two chunks of every sequence that a rank has."""
    return rank, 2 * cp - 1 - rank


def local_places(sizes: Sequence[int], rank: int, cp: int) -> Tensor:
    """Where a rank's tokens are among sequences of ``sizes`` tokens back to back: [sum(sizes) / cp] int64.

    ``sizes`` are multiples of 2 * cp.
    """
    assert all(size % (2 * cp) == 0 for size in sizes), (sizes, cp)
    length = torch.tensor(sizes)
    chunk, begin = length // (2 * cp), length.cumsum(0) - length
    firsts = torch.stack([begin + number * chunk for number in chunks_of(rank, cp)], dim=1).flatten()
    counts, total = chunk.repeat_interleave(2), sum(sizes) // cp
    offsets = firsts - counts.cumsum(0) + counts
    return torch.arange(total) + offsets.repeat_interleave(counts, output_size=total)


def gather_context(local: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, *, sums_gradient: bool) -> Tensor:
    """All tokens [sum(sizes), ...] in their order, from those of each rank [sum(sizes) / cp, ...]. Collective over the group.

    With ``sums_gradient`` each rank does something of its own with them (keys and values): the gradient of a token is the sum over
    ranks. Without, all ranks compute the same loss of them, and each takes the gradient of its own tokens.
    """
    order = torch.cat([local_places(sizes, rank, group.size()) for rank in range(group.size())])
    whole: Tensor = _Gather.apply(local, order.to(local.device), group, sums_gradient)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, group: dist.ProcessGroup, sums_gradient: bool) -> Tensor:
        ctx.order, ctx.group, ctx.sums_gradient = order, group, sums_gradient
        parts = local.new_empty(len(order), *local.shape[1:])
        dist.all_gather_into_tensor(parts, local.contiguous(), group=group)
        return torch.empty_like(parts).index_copy_(0, order, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if not ctx.sums_gradient:
            return grads[0][ctx.order.chunk(ctx.group.size())[ctx.group.rank()]], None, None, None
        parts = grads[0][ctx.order]
        mine = parts.new_empty(len(parts) // ctx.group.size(), *parts.shape[1:])
        dist.reduce_scatter_tensor(mine, parts, group=ctx.group)
        return mine, None, None, None
