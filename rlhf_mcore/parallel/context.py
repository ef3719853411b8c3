"""Context parallelism: split the tokens of every sequence over the ranks of a group, and gather them.

A sequence is split into 2 * cp chunks of equal length. Rank r holds the chunks r and 2 * cp - 1 - r, which balances
the work under a causal mask. Packed sequences are split one by one, as Megatron and Transformer Engine expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of(rank: int, cp: int) -> tuple[int, int]:
    """Return the numbers of the two chunks of every sequence that a rank holds."""
    return rank, 2 * cp - 1 - rank


def local_places(sizes: Sequence[int], rank: int, cp: int) -> Tensor:
    """Return the positions of a rank's tokens in sequences of ``sizes`` tokens back to back: [sum(sizes) / cp] int64.

    ``sizes`` are multiples of 2 * cp.
    """
    assert all(size % (2 * cp) == 0 for size in sizes), (sizes, cp)
    length = torch.tensor(sizes)
    chunk, begin = length // (2 * cp), length.cumsum(0) - length
    firsts = torch.stack([begin + number * chunk for number in chunks_of(rank, cp)], dim=1).flatten()
    counts, total = chunk.repeat_interleave(2), sum(sizes) // cp
    offsets = firsts - counts.cumsum(0) + counts
    return torch.arange(total) + offsets.repeat_interleave(counts, output_size=total)


def gather_context(local: Tensor, order: Tensor, group: dist.ProcessGroup, *, sums_gradient: bool) -> Tensor:
    """Gather each rank's tokens [sum(sizes) / cp, ...] into all tokens [sum(sizes), ...] in order.

    Collective over the group.

    ``order``: the positions from ``order_of_ranks``.

    With ``sums_gradient``, each rank uses the tokens differently (keys and values), so the gradient of a token is the
    sum over ranks. Without it, all ranks compute the same loss, and each keeps the gradient of its own tokens.
    """
    whole: Tensor = _Gather.apply(local, order, group, sums_gradient)
    return whole


def order_of_ranks(sizes: Sequence[int], cp: int) -> Tensor:
    """Return the positions of all ranks' tokens in the sequences, rank after rank: [sum(sizes)] int64."""
    return torch.cat([local_places(sizes, rank, cp) for rank in range(cp)])


def order_of_one(length: int, cp: int, device: torch.device) -> Tensor:
    """Compute ``order_of_ranks`` for one sequence on a device, without copying anything to it."""
    chunks = torch.arange(length, device=device).chunk(2 * cp)
    return torch.cat([chunks[number] for rank in range(cp) for number in chunks_of(rank, cp)])


def to_parts(local: Tensor, widths: Sequence[int], order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tokens with all elements for all tokens, in order, with this rank's part of the elements.

    Collective over the group, like ``to_tokens`` (Jacobs et al. 2023, arXiv 2309.14509: "Ulysses").

    Args:
        local: [sum(sizes) / cp, b, sum(widths)].
        widths: number of elements of each rank's part, which may be 0.
        order: [sum(sizes)] from ``order_of_ranks``, on the device of ``local``.

    Returns:
        [sum(sizes), b, widths[rank]].
    """
    count, batch, width = len(local), local.size(1), widths[group.rank()]
    sent = torch.cat([part.flatten() for part in local.split(list(widths), dim=-1)])
    counts = [count * batch * each for each in widths]
    received: Tensor = _Exchange.apply(sent, counts, [count * batch * width] * group.size(), group)
    tokens = received.view(len(order), batch, width)
    return torch.empty_like(tokens).index_copy(0, order, tokens)


def to_tokens(part: Tensor, widths: Sequence[int], order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reverse ``to_parts``: [sum(sizes), b, widths[rank]] -> [sum(sizes) / cp, b, sum(widths)]."""
    count, batch, width = len(order) // group.size(), part.size(1), widths[group.rank()]
    counts = [count * batch * each for each in widths]
    sent = part.index_select(0, order).flatten()
    received: Tensor = _Exchange.apply(sent, [count * batch * width] * group.size(), counts, group)
    parts = [x.view(count, batch, each) for x, each in zip(received.split(counts), widths, strict=True)]
    return torch.cat(parts, dim=-1)


class SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group.

    Megatron's version does not sum non-contiguous gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].clone(memory_format=torch.contiguous_format)
        if summed.numel():
            dist.all_reduce(summed, group=ctx.group)
        return summed, None


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
        local = parts.new_empty(len(parts) // ctx.group.size(), *parts.shape[1:])
        dist.reduce_scatter_tensor(local, parts, group=ctx.group)
        return local, None, None, None


class _Exchange(torch.autograd.Function):
    """An all-to-all of flat tensors. The backward pass exchanges their gradients in reverse."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        received = sent.new_empty(sum(receives))
        dist.all_to_all_single(received, sent, receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        returned = grads[0].new_empty(sum(ctx.sends))
        dist.all_to_all_single(returned, grads[0].contiguous(), ctx.sends, ctx.receives, group=ctx.group)
        return returned, None, None, None
