"""Compare a policy with a teacher's most probable tokens, from output layers with sharded vocabularies.

A teacher's distribution is sent as k + 1 events: its k most probable tokens with their logprobs, and the log of the
total probability of all other tokens. If k is the vocabulary size, the events are the whole distribution. No tensor
is as large as tokens times vocabulary, and teacher and student can use different layouts. Merging tokens into one
event never increases a divergence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.logprobs import LOWEST, _chunks, _Columns, _logits, _slices, chunk_tokens_of

if TYPE_CHECKING:
    from rlhf_mcore.algorithms.kl import Divergence


def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_tokens: int | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute the ``count`` most probable tokens of each distribution and the rest. Collective, without gradients.

    Args:
        hidden, weight, temperature, group, chunk_tokens, added, cap: as in ``linear_logprobs``.
        count: number of tokens.
        vocab_size: true size, at least ``count``; tokens from this id on have no probability.

    Returns:
        [N, 2, count + 1] fp32: ids, which are exact below 2 ** 24, and logprobs; at the end -1 and the log of the
        rest.
    """
    columns = _Columns.of(group, len(weight), vocab_size, temperature)
    low, rows = added if added is not None else (None, None)
    parts = []
    for a, b in _chunks(len(hidden), chunk_tokens or chunk_tokens_of(len(weight))):
        logits = _logits(hidden[a:b].to(weight.dtype), weight, None if low is None else low[a:b], rows, cap)
        parts.append(_top_of_chunk(logits, count, columns))
    return torch.cat(parts)


def _top_of_chunk(logits: Tensor, count: int, columns: _Columns) -> Tensor:
    def scale_slices() -> Iterator[tuple[int, int, Tensor]]:
        return ((a, b, columns.scale(logits[a:b], copy=True)) for a, b in _slices(logits))

    largest = [z.topk(min(count, z.size(1))) for _, _, z in scale_slices()]
    values, ids = torch.cat([x.values for x in largest]), torch.cat([x.indices for x in largest]) + columns.first
    if columns.is_shared(logits):
        values, ids = _gather_columns(values, columns), _gather_columns(ids, columns)
        values, places = values.topk(count)
        ids = ids.gather(1, places)
    rests = zip(*[_rest_of_rows(z, ids[a:b], columns) for a, b, z in scale_slices()], strict=True)
    peak, sums = (torch.cat(parts) for parts in rests)
    rest = _reduce_rest(peak, sums, columns)
    events = torch.cat([values, rest[:, None]], dim=1)
    logprobs = events - events.logsumexp(1, keepdim=True)
    return torch.stack([torch.cat([ids.float(), -torch.ones_like(rest)[:, None]], dim=1), logprobs], dim=1)


def _gather_columns(values: Tensor, columns: _Columns) -> Tensor:
    """Concatenate values [n, k] of all ranks along dimension 1. Collective over the columns' group."""
    parts = [torch.empty_like(values) for _ in range(columns.group.size())]
    dist.all_gather(parts, values.contiguous(), group=columns.group)
    return torch.cat(parts, dim=1)


def _rest_of_rows(z: Tensor, ids: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    """Return the largest logit of this rank's columns except ``ids`` [n, k], and the sum of exponentials relative to it."""
    places, here = columns.local(ids, z.size(1))
    # For ids on other ranks, +inf leaves the column unchanged.
    rest = z.scatter_reduce(1, places, torch.where(here, -torch.inf, torch.inf).to(z.dtype), "amin")
    peak = rest.amax(1).clamp(min=LOWEST)
    return peak, rest.sub_(peak[:, None]).exp_().sum(1)


def _reduce_rest(peak: Tensor, sums: Tensor, columns: _Columns) -> Tensor:
    """Compute log-sum-exp [n] of all ranks from the results of ``_rest_of_rows``. Collective over the columns' group."""
    if columns.is_shared(sums):
        own, peak = peak, peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        sums = sums * (own - peak).exp()
        dist.all_reduce(sums, group=columns.group)
    return peak + sums.log()


@dataclass(frozen=True, slots=True)
class TeacherTopTokens:
    """A teacher's events of N tokens, to compare a policy's distributions with."""

    ids: Tensor  # [N, k] int64
    log_t: Tensor  # [N, k + 1]: the teacher's logprobs
    divergence: Divergence

    @classmethod
    def of(cls, top: Tensor, divergence: Divergence) -> TeacherTopTokens:
        """Build from the result [N, 2, k + 1] of ``top_tokens``."""
        return cls(top[:, 0, :-1].long(), top[:, 1].clamp(min=LOWEST), divergence)

    def of_tokens(self, a: int, b: int) -> TeacherTopTokens:
        return TeacherTopTokens(self.ids[a:b], self.log_t[a:b], self.divergence)

    def rest(self, z: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
        """Return the largest of the other logits of this rank, and the sum of exponentials relative to it, each [n]."""
        return _rest_of_rows(z, self.ids, columns)

    def log_events(
        self, logits: Tensor, peak: Tensor, log_sum: Tensor, rest: Sequence[Tensor], columns: _Columns
    ) -> Tensor:
        """Compute the policy's logprobs [n, k + 1] of the events. Collective over the columns' group.

        ``logits``: unscaled [n, V_local]; ``peak``: the largest scaled logit [n]. The log-sum-exp ``log_sum`` [n] and
        ``rest``, the result of the method, are relative to it.
        """
        places, here = columns.local(self.ids, logits.size(1))
        picked = logits.gather(1, places).float() / columns.temperature - peak[:, None]
        picked = torch.where(here, picked, 0.0)
        if columns.is_shared(logits):
            dist.all_reduce(picked, group=columns.group)
        events = torch.cat([picked, _reduce_rest(rest[0], rest[1], columns)[:, None]], dim=1)
        return (events - log_sum[:, None]).clamp_(min=LOWEST)

    def values(self, log_p: Tensor) -> Tensor:
        """Sum the divergence [n] over the events."""
        return self.divergence.terms(self.log_t, log_p).sum(1)

    def gradient(self, log_p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms of the logits' gradient, given the gradient ``grad`` [n] of the divergence.

        The gradient of logit v is p_v * of_all [n], plus at_ids [n, k] if v is in ``ids``. With the slopes f_e = dD /
        dp_e and the event e of v: dD / dz_v = p_v (f_e - sum_i p_i f_i).
        """
        weighted, slope = self.divergence.slopes(self.log_t, log_p)
        of_all, at_ids = slope - weighted.sum(1), weighted[:, :-1] - log_p[:, :-1].exp() * slope[:, None]
        return of_all * grad, at_ids * grad[:, None]
