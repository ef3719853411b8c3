"""Logprobs and entropy of an output layer whose vocabulary is sharded over tensor-parallel ranks.

No rank ever sees the full vocabulary: three scalars per token are reduced instead. Nor are there logits of all tokens: they are
made in chunks of tokens, and made again in the backward pass, so the extra memory is one chunk of them whatever the batch. Megatron's
own vocab-parallel cross entropy is not used: it overwrites fp32 logits, gives no entropy, and its fused form rounds gradients to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 2048  # of logits that are there whose softmax is computed at a time
CACHE_BYTES = 2**19  # of them, so that what a CPU does with them stays in its cache
CHUNK_BYTES = 512 * 2**20  # of fp32 logits that an output layer makes at a time


def chunk_tokens_of(columns: int) -> int:
    """Tokens whose fp32 logits over so many columns fill a chunk."""
    return max(CHUNK_BYTES // (4 * columns), 1)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_tokens: int | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Logprob of each label, and entropy of each distribution where it is wanted, of what an output layer makes of hidden states.

    Args:
        hidden: [N, h], the same on all ranks of the group. Their gradient is summed over the group, so it is whole on each.
        weight: [V_local, h], this rank's rows of the output layer's weight.
        labels: [N] int64 token ids.
        vocab_size: the true size; rows of the weight beyond it are padding and get no probability.
        temperature: logits are divided by it, as the sampler does.
        group: the tensor-parallel group.
        chunk_tokens: most tokens that have logits at a time; None: as many as ``CHUNK_BYTES`` hold. Logits of no more tokens than
            that stay for the backward pass; those of more are computed again there, once.

    Returns:
        logprobs [N] and entropy [N], both fp32 and differentiable, equal on all ranks of the group. No entropy unless
        ``with_entropy``.
    """
    hidden = hidden.to(weight.dtype)
    if group.size() > 1:
        hidden = _SumGradient.apply(hidden, group)
    chunk = chunk_tokens or chunk_tokens_of(weight.size(0))
    found: tuple[Tensor, Tensor | None]
    if len(hidden) > chunk:
        found = _ChunkedLinear.apply(hidden, weight, labels, vocab_size, temperature, group, chunk, with_entropy)
        return found
    found = _KeptLinear.apply(hidden, weight, labels, vocab_size, temperature, group, with_entropy)
    return found


class _SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous()
        if summed.numel():
            dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _KeptLinear(torch.autograd.Function):
    """Of logits that are made once and become their own gradient.

    With z = logits / T - max(logits / T): logprob = z_y - log sum_j exp z_j, entropy = log sum_j exp z_j - sum_j p_j z_j.
    The largest logit is subtracted first, so an offset that all logits share costs no precision.

    d logprob / d z_j = 1[j = y] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.columns = _Columns.of(group, len(weight), vocab_size, temperature)
        z = F.linear(hidden, weight).float()
        # On a CPU as many as its cache holds, unless that would make more messages.
        in_cache = not z.is_cuda and group.size() == 1
        ctx.chunk = max(CACHE_BYTES // (4 * z.size(1)), 1) if in_cache else CHUNK_TOKENS

        def scaled(a: int, b: int) -> Tensor:
            return ctx.columns.scaled(z[a:b])

        logprobs, entropy, sums = _forward(scaled, labels, ctx.chunk, ctx.columns, with_entropy, keeps=True)
        ctx.save_for_backward(hidden, weight, labels, z, *sums)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, z, _, *sums = ctx.saved_tensors  # a second backward pass is refused: z has changed
        for a, b in _chunks(len(hidden), ctx.chunk):
            of_chunk = [None, *(s[a:b] for s in sums)]  # the peak is subtracted already
            found = _gradient(z[a:b], labels[a:b], of_chunk, _cut(grads, a, b), ctx.columns)
            if found.data_ptr() != z[a:b].data_ptr():
                z[a:b] = found
        grad = z.to(weight.dtype)
        grad_weight = grad.t() @ hidden if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, None, None, None, None, None


class _ChunkedLinear(torch.autograd.Function):
    """The same with only one chunk of logits there at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.chunk = _Columns.of(group, len(weight), vocab_size, temperature), chunk

        def scaled(a: int, b: int) -> Tensor:
            return ctx.columns.scaled(F.linear(hidden[a:b], weight))

        logprobs, entropy, sums = _forward(scaled, labels, chunk, ctx.columns, with_entropy)
        ctx.save_for_backward(hidden, weight, labels, *sums)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, *sums = ctx.saved_tensors
        out = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for a, b in _chunks(len(hidden), ctx.chunk):
            z = ctx.columns.scaled(F.linear(hidden[a:b], weight))
            grad = _gradient(z, labels[a:b], [s[a:b] for s in sums], _cut(grads, a, b), ctx.columns).to(weight.dtype)
            torch.mm(grad, weight, out=out[a:b])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[a:b])
        return out, grad_weight, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's columns of the vocabulary."""

    group: dist.ProcessGroup
    first: int
    width: int  # true columns from ``first`` on; fewer than there are where the rest is padding
    temperature: float

    @classmethod
    def of(cls, group: dist.ProcessGroup, columns: int, vocab_size: int, temperature: float) -> _Columns:
        first = group.rank() * columns
        return cls(group, first, vocab_size - first, temperature)

    def scaled(self, logits: Tensor) -> Tensor:
        """fp32 logits over temperature with the padding columns at -inf. The logits may be overwritten."""
        z = logits.float()
        if self.temperature != 1.0:
            z.div_(self.temperature)
        if self.width < z.size(1):
            z[:, max(self.width, 0) :] = -torch.inf
        return z

    def local(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Column of each label on this rank (0 where another rank has it), and whether this rank has it."""
        local = labels - self.first
        here = (local >= 0) & (local < columns)
        return torch.where(here, local, 0), here


def _forward(
    scaled: Callable[[int, int], Tensor],
    labels: Tensor,
    chunk: int,
    columns: _Columns,
    with_entropy: bool,
    *,
    keeps: bool = False,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Logprobs, entropy, and what the backward pass needs of each token.

    ``scaled``: from where to where -> scaled logits, which are overwritten: with ``keeps`` by those relative to the largest.
    """
    parts = [
        _forward_chunk(scaled(a, b), labels[a:b], columns, with_entropy, keeps) for a, b in _chunks(len(labels), chunk)
    ]
    target, log_sum, peak, *expected = (torch.cat(column) for column in zip(*parts, strict=True))
    entropy = log_sum - expected[0] if with_entropy else None
    return target - log_sum, entropy, [peak, log_sum, *([] if entropy is None else [entropy])]


def _gradient(
    z: Tensor, labels: Tensor, sums: Sequence[Tensor | None], grads: Sequence[Tensor | None], columns: _Columns
) -> Tensor:
    """Gradient of a chunk's logits [n, V_local] fp32. ``z``: the scaled logits, which are overwritten; relative to no ``peak``."""
    grad_logprobs, grad_entropy = grads
    peak, log_sum, *entropy = sums
    assert log_sum is not None
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum)
    log_p = (z if peak is None else z.sub_(peak[:, None])).sub_(log_sum[:, None])
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = log_p.exp()
        # Padding has p = 0 and log p = -inf, whose product must be 0.
        assert entropy[0] is not None
        surprise = torch.where(p > 0, log_p, 0.0) + entropy[0][:, None]
        grad = -p * (grad_logprobs[:, None] + grad_entropy[:, None] * surprise)
    places, here = columns.local(labels, z.size(1))
    grad[torch.arange(len(grad), device=grad.device), places] += torch.where(here, grad_logprobs, 0.0)
    return grad if columns.temperature == 1.0 else grad.div_(columns.temperature)


def _chunks(num_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """One of no tokens where there are none: all ranks of a group make the same collectives."""
    return [(a, min(a + chunk, num_tokens)) for a in range(0, max(num_tokens, 1), chunk)]


def _cut(grads: Sequence[Tensor | None], a: int, b: int) -> list[Tensor | None]:
    return [None if grad is None else grad[a:b] for grad in grads]


def _forward_chunk(
    z: Tensor, labels: Tensor, columns: _Columns, with_entropy: bool, keeps: bool = False
) -> list[Tensor]:
    """Target logit, log-sum-exp, both relative to the largest logit, that one, and the expected logit: [n] each.

    Reduced over the group. ``z``, the scaled logits, is overwritten: with ``keeps`` it is relative to the largest then.
    """
    peak = z.amax(dim=1)
    is_shared = columns.group.size() > 1 and len(z) > 0
    if is_shared:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
    z -= peak[:, None]
    places, here = columns.local(labels, z.size(1))
    target = torch.where(here, z.gather(1, places[:, None]).squeeze(1), 0.0)
    if with_entropy:
        weights = z.exp()
        sums = torch.stack([target, weights.sum(1), (weights * torch.where(weights > 0, z, 0.0)).sum(1)])
    else:
        sums = torch.stack([target, (z.exp() if keeps else z.exp_()).sum(1)])
    if is_shared:
        dist.all_reduce(sums, group=columns.group)
    return [sums[0], sums[1].log(), peak, *([sums[2] / sums[1]] if with_entropy else [])]
