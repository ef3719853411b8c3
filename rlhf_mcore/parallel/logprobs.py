"""Logprobs and entropy of an output layer whose vocabulary is sharded over tensor-parallel ranks.

No rank ever sees the full vocabulary: three scalars per token are reduced instead. Nor are there logits of all tokens: they are
made in chunks of tokens, and made again in the backward pass, so the extra memory is one chunk of them whatever the batch. Megatron's
own vocab-parallel cross entropy is not used: it overwrites fp32 logits, gives no entropy, and its fused form rounds gradients to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf_mcore.types import Ragged

CHUNK_TOKENS = 2048  # of logits that are there whose softmax is computed at a time
CACHE_BYTES = 2**19  # of them, so that what a CPU does with them stays in its cache
CHUNK_BYTES = 512 * 2**20  # of fp32 logits that an output layer makes at a time


def chunk_tokens_of(columns: int) -> int:
    """Tokens whose fp32 logits over so many columns fill a chunk."""
    return max(CHUNK_BYTES // (4 * columns), 1)


class TokenLogprobs(NamedTuple):
    """Of tokens and their distributions, fp32 and differentiable; what was not asked for is None.

    ``log_mass`` is the log of the probability that a distribution has on the support of its token. So ``logprobs - log_mass`` are the
    logprobs under what top-k and top-p leave of it, renormalised.
    """

    logprobs: Tensor
    entropy: Tensor | None
    log_mass: Tensor | None


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
    support: Subsets | None = None,
    main_grad: Tensor | None = None,
) -> TokenLogprobs:
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
        support: ids of tokens of each of the N labels; no ids stand for the whole vocabulary.
        main_grad: [V_local, h] fp32, to which the backward pass adds the weight's gradient; autograd then gets zeros for it. None:
            autograd gets the gradient.

    Returns:
        logprobs [N], entropy [N] unless not ``with_entropy``, and log_mass [N] with a support, equal on all ranks of the group.
    """
    hidden = hidden.to(weight.dtype)
    if group.size() > 1:
        hidden = _SumGradient.apply(hidden, group)
    chunk = chunk_tokens or chunk_tokens_of(weight.size(0))
    columns = _Columns.of(group, len(weight), vocab_size, temperature)
    subsets = None if support is None else support.on(hidden.device)
    if len(hidden) > chunk:
        return TokenLogprobs(
            *_ChunkedLinear.apply(hidden, weight, labels, columns, chunk, with_entropy, subsets, main_grad)
        )
    return TokenLogprobs(*_KeptLinear.apply(hidden, weight, labels, columns, with_entropy, subsets, main_grad))


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

    With a support S: log_mass = log sum_{j in S} p_j, and d log_mass / d z_j = 1[j in S] p_j / exp(log_mass) - p_j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        columns: _Columns,
        with_entropy: bool,
        subsets: Subsets | None,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.subsets, ctx.main_grad = columns, subsets, main_grad
        z = F.linear(hidden, weight).float()
        # On a CPU as many as its cache holds, unless that would make more messages.
        in_cache = not z.is_cuda and columns.group.size() == 1
        ctx.chunk = max(CACHE_BYTES // (4 * z.size(1)), 1) if in_cache else CHUNK_TOKENS

        def scaled(a: int, b: int) -> Tensor:
            return ctx.columns.scaled(z[a:b])

        found, sums = _forward(scaled, labels, ctx.chunk, columns, with_entropy, subsets, keeps=True)
        ctx.save_for_backward(hidden, weight, labels, z, *sums)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, z, _, *sums = ctx.saved_tensors  # a second backward pass is refused: z has changed
        for a, b in _chunks(len(hidden), ctx.chunk):
            of_chunk = [None, *_cut(sums, a, b)]  # the peak is subtracted already
            within = None if ctx.subsets is None else ctx.subsets.of_tokens(a, b)
            found = _gradient(z[a:b], labels[a:b], of_chunk, _cut(grads, a, b), ctx.columns, within)
            if found.data_ptr() != z[a:b].data_ptr():
                z[a:b] = found
        grad, total = z.to(weight.dtype), _WeightGradient(ctx, weight)
        total.add(grad, hidden)
        return grad @ weight, total.rest(), *[None] * 5


class _ChunkedLinear(torch.autograd.Function):
    """The same with only one chunk of logits there at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        columns: _Columns,
        chunk: int,
        with_entropy: bool,
        subsets: Subsets | None,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.chunk, ctx.subsets, ctx.main_grad = columns, chunk, subsets, main_grad

        def scaled(a: int, b: int) -> Tensor:
            return ctx.columns.scaled(F.linear(hidden[a:b], weight))

        found, sums = _forward(scaled, labels, chunk, columns, with_entropy, subsets)
        ctx.save_for_backward(hidden, weight, labels, *sums)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, *sums = ctx.saved_tensors
        out, total = torch.empty_like(hidden), _WeightGradient(ctx, weight)
        for a, b in _chunks(len(hidden), ctx.chunk):
            z = ctx.columns.scaled(F.linear(hidden[a:b], weight))
            within = None if ctx.subsets is None else ctx.subsets.of_tokens(a, b)
            grad = _gradient(z, labels[a:b], _cut(sums, a, b), _cut(grads, a, b), ctx.columns, within).to(weight.dtype)
            torch.mm(grad, weight, out=out[a:b])
            total.add(grad, hidden[a:b])
        return out, total.rest(), *[None] * 6


class _WeightGradient:
    """The gradient of an output layer's weight, summed in fp32 over chunks of tokens.

    A sum in bf16 would lose of every chunk what is below half a unit in the last place of the sum.
    """

    def __init__(self, ctx: Any, weight: Tensor) -> None:
        self._weight, self._is_wanted, self._is_elsewhere = weight, ctx.needs_input_grad[1], ctx.main_grad is not None
        self._total = ctx.main_grad
        if self._is_wanted and not self._is_elsewhere:
            self._total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add what a chunk contributes. ``grad``: of its logits [n, V_local]; ``hidden``: [n, h] of the same type."""
        if not self._is_wanted:
            return
        total, left = self._total, grad.t()
        if grad.dtype == total.dtype:
            total.addmm_(left, hidden)
        elif grad.device.type == "cpu":  # torch has the product below on CUDA alone
            total.addmm_(left.to(total.dtype), hidden.to(total.dtype))
        else:
            torch.addmm(total, left, hidden, out_dtype=total.dtype, out=total)

    def rest(self) -> Tensor | None:
        """What autograd is told. Hooks of data parallelism wait for a tensor, also where the sum is in ``main_grad``."""
        if not self._is_wanted:
            return None
        return torch.zeros_like(self._weight) if self._is_elsewhere else self._total.to(self._weight.dtype)


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

    def is_shared(self, z: Tensor) -> bool:
        """Whether sums over the columns of ``z`` are sums over ranks too."""
        return self.group.size() > 1 and len(z) > 0

    def local(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Column of each label on this rank (0 where another rank has it), and whether this rank has it."""
        local = labels - self.first
        here = (local >= 0) & (local < columns)
        return torch.where(here, local, 0), here


@dataclass(frozen=True, slots=True)
class Subsets:
    """The support of each token as one list of pairs, by token: the token's number, and an id of its support."""

    tokens: Tensor  # [M] int64
    ids: Tensor  # [M] int64
    ends: list[int]  # [N + 1]: where the pairs of each token end, behind a zero
    is_cut: Tensor  # [N] bool: tokens with a support; the others were drawn from the whole vocabulary

    @classmethod
    def of(cls, support: Ragged[Tensor]) -> Subsets:
        """Return those of a field of the host, there."""
        counts = support.counts.long()
        tokens = torch.arange(len(counts)).repeat_interleave(counts)
        return cls(tokens, support.values.long(), [0, *accumulate(counts.tolist())], counts > 0)

    def on(self, device: torch.device) -> Subsets:
        return Subsets(self.tokens.to(device), self.ids.to(device), self.ends, self.is_cut.to(device))

    def of_tokens(self, a: int, b: int) -> Subsets:
        first, last = self.ends[a], self.ends[b]
        return Subsets(self.tokens[first:last] - a, self.ids[first:last], self.ends[a : b + 1], self.is_cut[a:b])

    def log_sum(self, z: Tensor, columns: _Columns) -> Tensor:
        """Log-sum-exp [n] over each support, zero where there is none. Collective over the columns' group."""
        places, here = columns.local(self.ids, z.size(1))
        held = torch.where(here, z[self.tokens, places], -torch.inf)
        # Relative to the largest of the support: all of it may be improbable by now.
        peak = z.new_full((len(z),), -torch.inf).scatter_reduce_(0, self.tokens, held, "amax")
        if is_shared := columns.is_shared(z):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        peak = torch.where(self.is_cut, peak, 0.0)
        sums = z.new_zeros(len(z)).index_add_(0, self.tokens, (held - peak[self.tokens]).exp_())
        if is_shared:
            dist.all_reduce(sums, group=columns.group)
        return torch.where(self.is_cut, peak + sums.log(), 0.0)


def _forward(
    scaled: Callable[[int, int], Tensor],
    labels: Tensor,
    chunk: int,
    columns: _Columns,
    with_entropy: bool,
    subsets: Subsets | None,
    *,
    keeps: bool = False,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], list[Tensor | None]]:
    """Logprobs, entropy and log mass, and what the backward pass needs of each token.

    ``scaled``: from where to where -> scaled logits, which are overwritten: with ``keeps`` by those relative to the largest.
    """
    parts = [
        _forward_chunk(
            scaled(a, b),
            labels[a:b],
            columns,
            with_entropy,
            None if subsets is None else subsets.of_tokens(a, b),
            keeps,
        )
        for a, b in _chunks(len(labels), chunk)
    ]
    target, log_sum, peak, *others = (torch.cat(column) for column in zip(*parts, strict=True))
    entropy = log_sum - others.pop(0) if with_entropy else None
    log_mass = None if subsets is None else torch.where(subsets.is_cut, others.pop() - log_sum, 0.0)
    return (target - log_sum, entropy, log_mass), [peak, log_sum, entropy, log_mass]


def _gradient(
    z: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
    subsets: Subsets | None,
) -> Tensor:
    """Gradient of a chunk's logits [n, V_local] fp32. ``z``: the scaled logits, which are overwritten; relative to no ``peak``."""
    grad_logprobs, grad_entropy, grad_mass = grads
    peak, log_sum, entropy, log_mass = sums
    assert log_sum is not None
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum)
    log_p = (z if peak is None else z.sub_(peak[:, None])).sub_(log_sum[:, None])
    spread, inside = grad_logprobs, None  # what every column gets by its probability, and those of a support beside it
    if grad_mass is not None:
        assert subsets is not None and log_mass is not None
        grad_mass = torch.where(subsets.is_cut, grad_mass, 0.0)
        spread = grad_logprobs + grad_mass  # exactly zero outside of the support for logprobs - log_mass
        own, own_here = columns.local(subsets.ids, z.size(1))
        share = (log_p[subsets.tokens, own] - log_mass[subsets.tokens]).exp_()
        inside = torch.where(own_here, share * grad_mass[subsets.tokens], 0.0)
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-spread[:, None])
    else:
        p = log_p.exp()
        # Padding has p = 0 and log p = -inf, whose product must be 0.
        assert entropy is not None
        surprise = torch.where(p > 0, log_p, 0.0) + entropy[:, None]
        grad = -p * (spread[:, None] + grad_entropy[:, None] * surprise)
    places, here = columns.local(labels, z.size(1))
    grad[torch.arange(len(grad), device=grad.device), places] += torch.where(here, grad_logprobs, 0.0)
    if inside is not None:
        assert subsets is not None
        grad.index_put_((subsets.tokens, own), inside, accumulate=True)
    return grad if columns.temperature == 1.0 else grad.div_(columns.temperature)


def _chunks(num_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """One of no tokens where there are none: all ranks of a group make the same collectives."""
    return [(a, min(a + chunk, num_tokens)) for a in range(0, max(num_tokens, 1), chunk)]


def _cut(values: Sequence[Tensor | None], a: int, b: int) -> list[Tensor | None]:
    return [None if each is None else each[a:b] for each in values]


def _forward_chunk(
    z: Tensor, labels: Tensor, columns: _Columns, with_entropy: bool, subsets: Subsets | None, keeps: bool = False
) -> list[Tensor]:
    """Target logit, log-sum-exp, both relative to the largest logit, that one, and as wanted the expected logit and the log-sum-exp of
    the support: [n] each.

    Reduced over the group. ``z``, the scaled logits, is overwritten: with ``keeps`` it is relative to the largest then.
    """
    peak = z.amax(dim=1)
    is_shared = columns.is_shared(z)
    if is_shared:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
    z -= peak[:, None]
    of_support = None if subsets is None else subsets.log_sum(z, columns)
    places, here = columns.local(labels, z.size(1))
    target = torch.where(here, z.gather(1, places[:, None]).squeeze(1), 0.0)
    if with_entropy:
        weights = z.exp()
        sums = torch.stack([target, weights.sum(1), (weights * torch.where(weights > 0, z, 0.0)).sum(1)])
    else:
        sums = torch.stack([target, (z.exp() if keeps else z.exp_()).sum(1)])
    if is_shared:
        dist.all_reduce(sums, group=columns.group)
    wanted = [*([sums[2] / sums[1]] if with_entropy else []), *([] if of_support is None else [of_support])]
    return [sums[0], sums[1].log(), peak, *wanted]
