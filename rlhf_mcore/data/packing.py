"""Assigns rows to ranks with equal token sums, and to microbatches under a token budget, either packed or padded by length."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_mcore.config.errors import ConfigError


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def pack(
    lengths: Sequence[int], max_tokens: int, min_bins: int = 1, multiple_of: int = 1, *, pad_multiple: int = 1
) -> list[list[int]]:
    """Pack rows into as few bins as a good heuristic finds, with nearly equal token sums.

    The sum of a bin, rounded up to ``pad_multiple``, is at most ``max_tokens``. Best-fit decreasing determines the number of
    bins (at most about 11/9 of the optimum, Johnson et al. 1974). The number is raised to ``min_bins`` and to a multiple of
    ``multiple_of``. Then largest differencing redistributes the rows over these bins. If its result exceeds the budget, the
    best-fit bins are levelled instead. Surplus bins are empty. Deterministic.

    Raises:
        ConfigError: one padded row alone is longer than ``max_tokens``.
    """
    check_budget(lengths, max_tokens, pad_multiple)
    budget = max_tokens // pad_multiple * pad_multiple
    fitted = _best_fit(lengths, budget)
    num_bins = round_up(max(len(fitted), min_bins), multiple_of)
    balanced = balance(lengths, num_bins)
    if all(sum(lengths[row] for row in rows) <= budget for rows in balanced):
        return balanced
    return _level(fitted + [[] for _ in range(num_bins - len(fitted))], lengths)


def group_by_length(
    lengths: Sequence[int], max_tokens: int, *, pad_multiple: int = 1, min_bins: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Group rows of similar length, so that rows x padded length (to ``pad_multiple``) is at most ``max_tokens``.

    Each group takes the longest remaining rows, as many as fit. This gives the fewest groups for a sorted list. The number of
    groups is raised as in ``pack``. To raise it, the largest groups are halved, and further groups stay empty.

    Raises:
        ConfigError: one padded row alone is longer than ``max_tokens``.
    """
    check_budget(lengths, max_tokens, pad_multiple)
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    while order:
        count = max_tokens // round_up(lengths[order[0]], pad_multiple)
        groups.append(order[:count])
        order = order[count:]
    num_groups = round_up(max(len(groups), min_bins), multiple_of)
    while len(groups) < num_groups:
        _split_largest(groups, lengths)
    return groups


def check_budget(lengths: Sequence[int], max_tokens: int, pad_multiple: int) -> None:
    """Raise a ConfigError if a padded row alone is longer than ``max_tokens``."""
    assert min(lengths, default=1) >= 1, "a row has at least one token"
    longest = max(lengths, default=0)
    needed = round_up(longest, pad_multiple)
    if needed > max_tokens:
        raise ConfigError(
            f"trainer.max_tokens_per_microbatch={max_tokens} is too small for row {lengths.index(longest)} with "
            f"{longest} tokens; set it to {needed} or more, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens"
        )


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign each row, longest first, to the fullest bin with enough free tokens (best-fit decreasing)."""
    bins: list[list[int]] = []
    # (free tokens, bin), sorted
    room: list[tuple[int, int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = bisect_left(room, (lengths[row], 0))
        if place == len(room):
            bins.append([])
            free, target = max_tokens, len(bins) - 1
        else:
            free, target = room.pop(place)
        bins[target].append(row)
        insort(room, (free - lengths[row], target))
    return bins


def _level(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Move rows from the heaviest bin with two or more rows to the lightest bin, while this reduces the difference of their sums.

    Every move lowers the sum of squared bin sums, and the lighter bin never becomes heavier than the other bin was. The loop
    therefore ends and keeps the budget.
    """
    sums = [sum(lengths[row] for row in rows) for rows in bins]
    while True:
        lightest = sums.index(min(sums))
        divisible = [place for place, rows in enumerate(bins) if len(rows) > 1]
        heaviest = max(divisible, key=lambda place: sums[place], default=lightest)
        gap = sums[heaviest] - sums[lightest]
        movable = [row for row in bins[heaviest] if lengths[row] < gap]
        if not movable:
            return [sorted(rows) for rows in bins]
        row = min(movable, key=lambda row: (abs(2 * lengths[row] - gap), row))
        bins[heaviest].remove(row)
        bins[lightest].append(row)
        sums[heaviest] -= lengths[row]
        sums[lightest] += lengths[row]


def _split_largest(groups: list[list[int]], lengths: Sequence[int]) -> None:
    """Halve the group with the most padded tokens among groups with two or more rows. If there is none, add an empty group."""
    divisible = [place for place, rows in enumerate(groups) if len(rows) > 1]
    if not divisible:
        groups.append([])
        return
    largest = max(divisible, key=lambda place: (len(groups[place]) * lengths[groups[place][0]], -place))
    half = (len(groups[largest]) + 1) // 2
    groups[largest : largest + 1] = [groups[largest][:half], groups[largest][half:]]


def balance(lengths: Sequence[float], num_bins: int) -> list[list[int]]:
    """Partition rows into ``num_bins`` bins with nearly equal sums (tokens or costs). Every row is in exactly one bin.

    This is the k-way largest differencing method (Karmarkar and Karp 1982, "The differencing method of set partitioning"). It
    keeps a heap of partial partitions, and joins the two with the largest spread, heaviest bin to lightest, until one
    remains. The cost is about O(rows * (log rows + num_bins)). Deterministic. A bin is empty only if there are fewer rows
    than bins.

    Return rows in ascending order within a bin, and bins ordered by their first row, empty bins last.
    """
    assert num_bins >= 1, num_bins
    # A partition is a list of its nonempty bins, heaviest first. Heap entries are (-spread, tie-breaker, partition).
    heap = [(-length, row, [_Bin(length, [row])]) for row, length in enumerate(lengths)]
    if num_bins == 1:
        return [list(range(len(lengths)))]
    heapq.heapify(heap)
    tie_breaker = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = _join(first, second, num_bins)
        spread = joined[0].tokens - (joined[-1].tokens if len(joined) == num_bins else 0)
        heapq.heappush(heap, (-spread, tie_breaker, joined))
        tie_breaker += 1
    bins = sorted(sorted(bin.rows) for bin in heap[0][2]) if heap else []
    return bins + [[] for _ in range(num_bins - len(bins))]


@dataclass(slots=True)
class _Bin:
    tokens: float
    rows: list[int] = field(default_factory=list)


def _join(first: list[_Bin], second: list[_Bin], num_bins: int) -> list[_Bin]:
    """Add the heaviest bins of ``second`` to empty bins, then to the lightest bins of ``first``. Both arguments are consumed."""
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
