"""Compute logprobs and entropy from an output layer whose vocabulary is sharded over tensor-parallel ranks.

No rank stores logits of the full vocabulary. Ranks reduce three scalars per token instead. No rank stores logits of
all tokens either: they are computed in chunks of tokens, and again in the backward pass, where their gradient
overwrites them. The extra memory is one chunk in the weight's dtype for any batch size.

Megatron's own vocab-parallel cross entropy is not used. It overwrites fp32 logits and returns no entropy, and its
fused form rounds gradients to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf_mcore.parallel import fused_softmax
from rlhf_mcore.parallel.context import SummedGradient
from rlhf_mcore.types import Ragged

if TYPE_CHECKING:
    from rlhf_mcore.parallel.top_tokens import TeacherTopTokens

CHUNK_BYTES = 512 * 2**20  # maximum fp32 logits that an output layer computes in one chunk
SLICE_BYTES = 64 * 2**20  # maximum fp32 logits in one softmax computation, which limits its temporary results
CACHE_BYTES = 2**19  # the same for a CPU, so that they stay in its cache
LOWEST = -1e4  # replaces the log of zero in products with zero and in differences of logs


def chunk_tokens_of(columns: int) -> int:
    """Return the number of tokens whose fp32 logits over ``columns`` columns fill a chunk."""
    return max(CHUNK_BYTES // (4 * columns), 1)


class TokenLogprobs(NamedTuple):
    """Logprobs and statistics of tokens' distributions, fp32 and differentiable; None if not requested.

    ``log_mass`` is the log of the total probability of a token's support. ``logprobs - log_mass`` are therefore the
    logprobs under the distribution that top-k and top-p truncate and renormalise.
    """

    logprobs: Tensor
    entropy: Tensor | None
    log_mass: Tensor | None
    divergence: Tensor | None = None  # from a teacher's distributions


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
    compared: TeacherTopTokens | None = None,
    main_grad: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    cap: float | None = None,
) -> TokenLogprobs:
    """Compute an output layer's logprob of each label from hidden states, and optionally the entropy of each distribution.

    Args:
        hidden: [N, h], equal on all ranks of the group. Its gradient is summed over the group, so it is complete on
            each rank.
        weight: [V_local, h], this rank's rows of the output layer's weight.
        labels: [N] int64 token ids.
        vocab_size: the true size; further rows of the weight are padding and have probability 0.
        temperature: logits are divided by it, as in the sampler.
        group: the tensor-parallel group.
        chunk_tokens: maximum number of tokens whose logits exist at once; None: as many as fit ``CHUNK_BYTES``. If
            there are more tokens, the backward pass recomputes their logits once. Otherwise the logits are stored for
            it.
        with_entropy: compute entropies too.
        support: token ids for each of the N labels; no ids mean the whole vocabulary.
        compared: a teacher's distributions of the N labels.
        main_grad: [V_local, h] fp32, to which the backward pass adds the weight's gradient; autograd then gets an
            empty sparse gradient. None: autograd gets the gradient.
        added: [N, r] and this rank's rows [V_local, r] of two matrices, whose product is added to the logits. The
            gradient of the former is also summed over the group.
        cap: bound c of logits z, which become c tanh(z / c) before they are divided by the temperature; None: no bound.

    Returns:
        logprobs [N], entropy [N] with ``with_entropy``, log_mass [N] with a support, and divergence [N] with
        ``compared``, equal on all ranks of the group.
    """
    hidden = hidden.to(weight.dtype)
    low, rows = added if added is not None else (None, None)
    if group.size() > 1:
        hidden = SummedGradient.apply(hidden, group)
        low = None if low is None else SummedGradient.apply(low, group)
    block = chunk_tokens or chunk_tokens_of(weight.size(0))
    columns = _Columns.of(group, len(weight), vocab_size, temperature, cap)
    subsets = None if support is None else support.on(hidden.device)
    wanted = with_entropy, subsets, compared
    return TokenLogprobs(*_Linear.apply(hidden, weight, low, rows, labels, columns, block, wanted, main_grad))


def _logits(
    hidden: Tensor, weight: Tensor, low: Tensor | None, rows: Tensor | None, cap: float | None = None
) -> Tensor:
    logits = F.linear(hidden, weight)
    if low is not None and rows is not None:
        logits.addmm_(low, rows.t())
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def _find_kernels(hidden: Tensor, wanted: Wanted) -> ModuleType | None:
    """Return the module of kernels that compute the softmax on a GPU.

    Return None to use plain torch, for example if sums need a fixed order.
    """
    if not hidden.is_cuda or wanted[1:] != (None, None) or torch.are_deterministic_algorithms_enabled():
        return None
    return fused_softmax if fused_softmax.can_compile() else None


class _Linear(torch.autograd.Function):
    """Compute logprobs block by block. Only the logits of one block of tokens exist at once.

    If all tokens are one block, its logits are stored. Otherwise the backward pass computes them again. It overwrites
    them by their gradient, so torch rejects a second backward pass from stored logits.

    With z = logits / T - max(logits / T): logprob = z_y - log sum_j exp z_j, entropy = log sum_j exp z_j - sum_j p_j
    z_j. The largest logit is subtracted first, so an offset that all logits share costs no precision.

    d logprob / d z_j = 1[j = y] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy).

    With a support S: log_mass = log sum_{j in S} p_j, and d log_mass / d z_j = 1[j in S] p_j / exp(log_mass) - p_j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        rows: Tensor | None,
        labels: Tensor,
        columns: _Columns,
        block: int,
        wanted: Wanted,
        main_grad: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.block, ctx.wanted, ctx.main_grad = columns, block, wanted, main_grad
        ctx.fused, parts, z = _find_kernels(hidden, wanted), [], None
        for a, b in _chunks(len(hidden), block):
            z = None  # free the logits of the last block before the next are computed
            z = _logits(hidden[a:b], weight, None if low is None else low[a:b], rows, columns.cap)
            parts.append(_forward_block(z, labels[a:b], columns, _wanted_of(wanted, a, b), ctx.fused))
        results, sums = _results(parts, wanted)
        ctx.save_for_backward(hidden, weight, low, rows, labels, z if len(parts) == 1 else None, *sums)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, low, rows, labels, z, *sums = ctx.saved_tensors
        out, total, of_rows = torch.empty_like(hidden), _WeightGradient(ctx, weight), _WeightGradient(ctx, rows, 3)
        of_low, is_kept = None if low is None else torch.empty_like(low), z is not None
        for a, b in _chunks(len(hidden), ctx.block):
            if not is_kept:
                z = None
                z = _logits(hidden[a:b], weight, None if low is None else low[a:b], rows, ctx.columns.cap)
            overwrite = _overwrite_by_gradient if ctx.fused is None else ctx.fused.overwrite_by_gradient
            of_block = labels[a:b], _slice(sums, a, b), _slice(grads, a, b), ctx.columns, _wanted_of(ctx.wanted, a, b)
            if ctx.columns.cap is None:
                overwrite(z, *of_block)
            else:
                _overwrite_bounded(z, *of_block, overwrite)
            torch.mm(z, weight, out=out[a:b])
            total.add(z, hidden[a:b])
            if of_low is not None:
                torch.mm(z, rows, out=of_low[a:b])
                of_rows.add(z, low[a:b])
        return out, total.rest(), of_low, of_rows.rest(), *[None] * 5


class _WeightGradient:
    """The gradient of the output layer's weight, or of an added matrix, summed in fp32 over chunks of tokens.

    A sum in bf16 would lose every term below half a unit in the last place of the sum. ``argument`` is the index of
    the weight among the arguments.
    """

    def __init__(self, ctx: Any, weight: Tensor, argument: int = 1) -> None:
        self._weight, self._is_wanted = weight, ctx.needs_input_grad[argument]
        self._total: Any = ctx.main_grad if argument == 1 else None
        self._is_elsewhere = self._total is not None
        if self._is_wanted and not self._is_elsewhere:
            self._total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add the contribution of a chunk.

        ``grad`` [n, V_local] is the gradient of its logits. ``hidden`` [n, h] has the same dtype.
        """
        if not self._is_wanted:
            return
        total, transposed = self._total, grad.t()
        if grad.dtype == total.dtype:
            total.addmm_(transposed, hidden)
        elif grad.device.type == "cpu":
            # torch supports the product below only on CUDA.
            hidden, rows = hidden.to(total.dtype), max(SLICE_BYTES // (4 * max(len(hidden), 1)), 1)
            for part, of_part in zip(transposed.split(rows), total.split(rows), strict=True):
                of_part.addmm_(part.to(total.dtype), hidden)
        else:
            torch.addmm(total, transposed, hidden, out_dtype=total.dtype, out=total)

    def rest(self) -> Tensor | None:
        """Return the gradient for autograd.

        Hooks of data parallelism need a tensor, even if the sum is in ``main_grad``. A sparse tensor without elements
        needs no memory.
        """
        if not self._is_wanted:
            return None
        if not self._is_elsewhere:
            return self._total.to(self._weight.dtype)
        like: Any = {"dtype": self._weight.dtype, "device": self._weight.device}
        return torch.sparse_coo_tensor(size=self._weight.shape, check_invariants=False, **like)


@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's columns of the vocabulary."""

    group: dist.ProcessGroup
    first: int
    width: int  # number of true columns from ``first`` on; further columns are padding
    temperature: float
    cap: float | None  # bound of logits

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, columns: int, vocab_size: int, temperature: float, cap: float | None = None
    ) -> _Columns:
        first = group.rank() * columns
        return cls(group, first, vocab_size - first, temperature, cap)

    def scale(self, logits: Tensor, *, copy: bool = False) -> Tensor:
        """Divide logits by the temperature in fp32, and set padding columns to -inf.

        Without ``copy``, fp32 logits are overwritten.
        """
        z = logits.to(torch.float32, copy=copy)
        if self.temperature != 1.0:
            z.div_(self.temperature)
        if self.width < z.size(1):
            z[:, max(self.width, 0) :] = -torch.inf
        return z

    def is_shared(self, z: Tensor) -> bool:
        """Return whether sums over the columns of ``z`` must also be reduced over ranks."""
        return self.group.size() > 1 and len(z) > 0

    def local(self, labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each label on this rank (0 if it is on another rank), and whether it is on this rank."""
        local = labels - self.first
        here = (local >= 0) & (local < columns)
        return torch.where(here, local, 0), here


@dataclass(frozen=True, slots=True)
class Subsets:
    """The supports of tokens: the ids that top-k and top-p allowed when a token was sampled.

    They are one list of pairs (token index, id in its support), sorted by token.
    """

    tokens: Tensor  # [M] int64
    ids: Tensor  # [M] int64
    ends: list[int]  # [N + 1]: zero, then the end of each token's pairs
    is_cut: Tensor  # [N] bool: tokens with a support; the others were sampled from the whole vocabulary

    @classmethod
    def of(cls, support: Ragged[Tensor]) -> Subsets:
        """Build the pairs of a ragged field on the host."""
        counts = support.counts.long()
        tokens = torch.arange(len(counts)).repeat_interleave(counts)
        return cls(tokens, support.values.long(), [0, *accumulate(counts.tolist())], counts > 0)

    def on(self, device: torch.device) -> Subsets:
        return Subsets(self.tokens.to(device), self.ids.to(device), self.ends, self.is_cut.to(device))

    def of_tokens(self, a: int, b: int) -> Subsets:
        first, last = self.ends[a], self.ends[b]
        ends = [end - first for end in self.ends[a : b + 1]]
        return Subsets(self.tokens[first:last] - a, self.ids[first:last], ends, self.is_cut[a:b])

    def log_sum(self, logits: Tensor, largest: Tensor, columns: _Columns) -> Tensor:
        """Compute log-sum-exp [n] over each support, relative to the largest logit [n]; zero for tokens without one.

        Collective over the columns' group.
        """
        places, here = columns.local(self.ids, logits.size(1))
        z = logits[self.tokens, places].float() / columns.temperature - largest[self.tokens]
        z = torch.where(here, z, -torch.inf)
        # Subtract the maximum over the support, because the current policy may give the whole support a low
        # probability.
        peak = torch.full_like(largest, -torch.inf).scatter_reduce_(0, self.tokens, z, "amax")
        if is_shared := columns.is_shared(logits):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        peak = torch.where(self.is_cut, peak, 0.0)
        sums = torch.zeros_like(largest).index_add_(0, self.tokens, (z - peak[self.tokens]).exp_())
        if is_shared:
            dist.all_reduce(sums, group=columns.group)
        return torch.where(self.is_cut, peak + sums.log(), 0.0)


# Requested results in addition to logprobs: whether entropy, support for its mass, teacher for the divergence.
Wanted = tuple[bool, Subsets | None, Union["TeacherTopTokens", None]]


def _wanted_of(wanted: Wanted, a: int, b: int) -> Wanted:
    with_entropy, subsets, compared = wanted
    within = None if subsets is None else subsets.of_tokens(a, b)
    return with_entropy, within, None if compared is None else compared.of_tokens(a, b)


def _results(
    parts: Sequence[Sequence[Tensor]], wanted: Wanted
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return logprobs, entropy, log mass and divergence, and the values of each token that the backward pass needs.

    ``parts``: the results of ``_forward_block`` for consecutive blocks of tokens.
    """
    with_entropy, subsets, compared = wanted
    target, log_sum, peak, *others = (torch.cat(column) for column in zip(*parts, strict=True))
    entropy = log_sum - others.pop(0) if with_entropy else None
    log_mass = None if subsets is None else torch.where(subsets.is_cut, others.pop(0) - log_sum, 0.0)
    events = None if compared is None else others.pop(0)
    divergence = None if compared is None or events is None else compared.values(events)
    return (target - log_sum, entropy, log_mass, divergence), [peak, log_sum, entropy, log_mass, events]


def _overwrite_by_gradient(
    logits: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
    wanted: Wanted,
) -> None:
    """Overwrite a block of logits [n, V_local] by their gradient, rounded once to their dtype."""
    for a, b in _slices(logits):
        z = columns.scale(logits[a:b])
        _compute_gradient(z, labels[a:b], _slice(sums, a, b), _slice(grads, a, b), columns, _wanted_of(wanted, a, b))
        if z.dtype != logits.dtype:
            logits[a:b] = z


def _overwrite_bounded(
    logits: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
    wanted: Wanted,
    overwrite: Callable[..., None],
) -> None:
    """Overwrite bounded logits c tanh(z / c) by the gradient of z. ``overwrite`` computes the gradient of its input."""
    assert columns.cap is not None
    for a, b in _slices(logits):
        slope = 1 - (logits[a:b] / columns.cap).square_()
        overwrite(logits[a:b], labels[a:b], _slice(sums, a, b), _slice(grads, a, b), columns, _wanted_of(wanted, a, b))
        logits[a:b] *= slope


def _compute_gradient(
    z: Tensor,
    labels: Tensor,
    sums: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    columns: _Columns,
    wanted: Wanted,
) -> None:
    """Overwrite scaled logits ``z`` [n, V_local] fp32 by the gradient of the logits."""
    grad_logprobs, grad_entropy, grad_mass, grad_divergence = grads
    peak, log_sum, entropy, log_mass, events = sums
    _, subsets, compared = wanted
    assert peak is not None and log_sum is not None
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum)
    log_p = z.sub_(peak[:, None]).sub_(log_sum[:, None])
    # The gradient of every column is proportional to its probability. Columns of a support also get ``inside``.
    spread, inside = grad_logprobs, None
    if grad_mass is not None:
        assert subsets is not None and log_mass is not None
        grad_mass = torch.where(subsets.is_cut, grad_mass, 0.0)
        # Exactly zero outside the support for logprobs - log_mass.
        spread = grad_logprobs + grad_mass
        own, own_here = columns.local(subsets.ids, z.size(1))
        share = (log_p[subsets.tokens, own] - log_mass[subsets.tokens]).exp_()
        inside = torch.where(own_here, share * grad_mass[subsets.tokens], 0.0)
    at_ids = None
    if grad_divergence is not None:
        assert compared is not None and events is not None
        of_all, at_ids = compared.gradient(events, grad_divergence)
        spread = spread - of_all
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-spread[:, None])
    else:
        assert entropy is not None
        p = log_p.exp()
        surprise = log_p.clamp_(min=LOWEST).add_(entropy[:, None])
        grad = surprise.mul_(grad_entropy[:, None]).add_(spread[:, None]).mul_(p).neg_()
    places, here = columns.local(labels, z.size(1))
    grad[torch.arange(len(grad), device=grad.device), places] += torch.where(here, grad_logprobs, 0.0)
    if inside is not None:
        assert subsets is not None
        grad.index_put_((subsets.tokens, own), inside, accumulate=True)
    if at_ids is not None:
        assert compared is not None
        places, here = columns.local(compared.ids, z.size(1))
        grad.scatter_add_(1, places, torch.where(here, at_ids, 0.0))
    if columns.temperature != 1.0:
        grad.div_(columns.temperature)


def _chunks(num_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Split ``num_tokens`` tokens into chunks.

    Without tokens, return one empty chunk, so that all ranks run the collectives.
    """
    return [(a, min(a + chunk, num_tokens)) for a in range(0, max(num_tokens, 1), chunk)]


def _slices(logits: Tensor) -> list[tuple[int, int]]:
    """Split the tokens of logits [n, V_local] into parts for one softmax computation."""
    limit = SLICE_BYTES if logits.is_cuda else CACHE_BYTES
    return _chunks(len(logits), max(limit // (4 * logits.size(1)), 1))


def _slice(values: Sequence[Tensor | None], a: int, b: int) -> list[Tensor | None]:
    return [None if each is None else each[a:b] for each in values]


def _forward_block(
    logits: Tensor, labels: Tensor, columns: _Columns, wanted: Wanted, fused: ModuleType | None
) -> list[Tensor]:
    """Compute sums over a block of logits [n, V_local] of any dtype, reduced over the group. The logits do not change.

    The results are the target logit and the log-sum-exp, both relative to the largest logit, and the largest logit,
    each [n]. Optional results are the expected logit [n], the log-sum-exp of the support [n], and the logprobs of the
    teacher's events [n, k + 1].
    """
    with_entropy, subsets, compared = wanted
    sum_rows = _sum_rows if fused is None else fused.sum_rows
    peak, *sums = sum_rows(logits, columns, wanted)
    sums, rest = sums[: 1 + with_entropy], sums[1 + with_entropy :]
    if columns.is_shared(logits):
        own, peak = peak, peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        # Convert sums relative to this rank's largest logit to sums relative to the largest of all ranks. For padding
        # alone they are zero.
        offset = (own - peak).clamp_min(-1e30)
        sums = [offset.exp() * x for x in (sums[0], *(s + sums[0] * offset for s in sums[1:]))]
        rest = [x + offset for x in rest[:1]] + rest[1:]
    places, here = columns.local(labels, logits.size(1))
    target = logits.gather(1, places[:, None]).squeeze(1).float() / columns.temperature - peak
    together = torch.stack([torch.where(here, target, 0.0), *sums])
    if columns.is_shared(logits):
        dist.all_reduce(together, group=columns.group)
    found = [together[0], together[1].log(), peak, *([together[2] / together[1]] if with_entropy else [])]
    if subsets is not None:
        found.append(subsets.log_sum(logits, peak, columns))
    if compared is not None:
        found.append(compared.log_events(logits, peak, found[1], rest, columns))
    return found


def _sum_rows(logits: Tensor, columns: _Columns, wanted: Wanted) -> list[Tensor]:
    """Return the largest scaled logit of each row on this rank, and sums over the row relative to it, each [n].

    The sums are sum_j exp z_j, with entropy sum_j z_j exp z_j, and with a teacher the two of ``rest_of_row``.
    """
    parts = [
        _sum_slice(columns.scale(logits[a:b], copy=True), columns, _wanted_of(wanted, a, b)) for a, b in _slices(logits)
    ]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _sum_slice(z: Tensor, columns: _Columns, wanted: Wanted) -> list[Tensor]:
    with_entropy, _, compared = wanted
    peak = z.amax(1).clamp_min(torch.finfo(z.dtype).min)  # finite even if all columns are padding
    z -= peak[:, None]
    rest = () if compared is None else compared.rest(z, columns)
    if not with_entropy:
        return [peak, z.exp_().sum(1), *rest]
    weights = z.exp()
    return [peak, weights.sum(1), weights.mul_(z.clamp_(min=LOWEST)).sum(1), *rest]
