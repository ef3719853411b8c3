"""Rows to data-parallel ranks, with token sums as equal as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Bin:
    tokens: int
    rows: list[int] = field(default_factory=list)


def balance(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Partition rows into ``num_bins`` bins of nearly equal token sums; every row is in exactly one bin.

    The k-way largest differencing method (Karmarkar and Karp 1982, "The differencing method of set partitioning"):
    keep a heap of partial partitions, join the two with the largest spread, heaviest bin to lightest, until one is
    left. About O(rows * (log rows + num_bins)). Deterministic. A bin is empty only when there are fewer rows than bins.

    Returns rows in ascending order within a bin, and bins ordered by their first row, empty ones last.
    """
    assert num_bins >= 1, num_bins
    # A partition is its non-empty bins, heaviest first. Heap entries are (-spread, tie-breaker, partition).
    heap = [(-length, row, [_Bin(length, [row])]) for row, length in enumerate(lengths)]
    if num_bins == 1:
        return [list(range(len(lengths)))]
    heapq.heapify(heap)
    tie_breaker = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = _join(first, second, num_bins)
        heapq.heappush(heap, (-_spread(joined, num_bins), tie_breaker, joined))
        tie_breaker += 1
    bins = sorted(sorted(bin.rows) for bin in heap[0][2]) if heap else []
    return bins + [[] for _ in range(num_bins - len(bins))]


def _join(first: list[_Bin], second: list[_Bin], num_bins: int) -> list[_Bin]:
    """Lay the heaviest bins of ``second`` on the lightest of ``first`` (which it consumes), empty bins before all."""
    num_filled = len(first)
    for place, bin in enumerate(second):
        target = num_bins - 1 - place
        if target < num_filled:
            first[target].tokens += bin.tokens
            first[target].rows.extend(bin.rows)
        else:
            first.append(bin)
    first.sort(key=lambda bin: -bin.tokens)
    return first


def _spread(bins: list[_Bin], num_bins: int) -> int:
    return bins[0].tokens - (bins[-1].tokens if len(bins) == num_bins else 0)
