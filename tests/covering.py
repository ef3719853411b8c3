"""Pairwise covering arrays: few rows that still contain every pair of values that matters.

A fault that depends on a combination of settings nearly always depends on two of them. A full product of the settings repeats each
pair many times; ``covering_rows`` picks the rows of it that contain each pair at least once:

    covering_rows({"layout": LAYOUTS, "cut": ("one", "many"), "packing": (True, False)}, is_valid)

``is_valid(row)`` says which rows exist. A pair that no valid row contains is not required.

``features(row)`` names other properties to pair, instead of the factors themselves. For example, twenty layouts and three cuts have
60 pairs, but what can go wrong depends on a layout's sizes: with ``tp``, ``pp``, ``cp`` as features every layout occurs at least
once, and each size meets each cut. Every value of every factor occurs in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Row], bool] = lambda row: True,
    features: Callable[[Row], Mapping[str, Hashable]] | None = None,
) -> list[Row]:
    """Return rows of the product of ``factors`` that contain every value, and every pair of values (or of features).

    The search is greedy and deterministic: the next row is the one that adds most. If several do, it is the one whose values occurred
    least so far, then the first in the order of the product. The product is enumerated, so it may have some ten thousand rows.
    """
    candidates = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    candidates = [row for row in candidates if is_valid(row)]
    covers = [_covered(row, features) for row in candidates]
    missing = set().union(*covers)
    chosen: list[int] = []
    used: Counter[Any] = Counter()
    while missing:
        added = [len(covered & missing) for covered in covers]
        most = max(added)
        ties = (number for number, count in enumerate(added) if count == most)
        best = min(ties, key=lambda number: sum(used[value] for value in candidates[number].items()))
        chosen.append(best)
        used.update(candidates[best].items())
        missing -= covers[best]
    return [candidates[number] for number in sorted(chosen)]


def _covered(row: Row, features: Callable[[Row], Mapping[str, Hashable]] | None) -> set[Any]:
    """Return what a row covers: its values, and the pairs of its features (by default of its values)."""
    values = set(row.items())
    return values | set(combinations(sorted((features(row) if features else row).items()), 2))
