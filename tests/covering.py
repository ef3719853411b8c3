"""Pairwise covering arrays: few rows that still contain every relevant pair of values.

A fault that depends on a combination of settings nearly always depends on two of them. A full product of the settings repeats each
pair many times. ``covering_rows`` selects rows of the product that contain each pair at least once:

    covering_rows({"layout": LAYOUTS, "cut": ("one", "many"), "packing": (True, False)}, is_valid)

``is_valid(row)`` says which rows exist. A pair that no valid row contains is not required.

``features(row)`` returns properties to pair instead of the factors. For example, 20 layouts and 3 cuts have 60 pairs, but faults
depend on the sizes of a layout. With ``tp``, ``pp`` and ``cp`` as features, every layout occurs at least once, and each size occurs
with each cut. Every value of every factor always occurs.
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

    The search is greedy and deterministic. The next row adds the most values and pairs. Among equal rows, it is the row with the least
    used values, then the first in the order of the product. The product is enumerated, so it may have some ten thousand rows.
    """
    candidates = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    candidates = [row for row in candidates if is_valid(row)]
    covers = [_find_pairs(row, features) for row in candidates]
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


def _find_pairs(row: Row, features: Callable[[Row], Mapping[str, Hashable]] | None) -> set[Any]:
    """Return the values of a row, and the pairs of its features. Without features, return the pairs of its values."""
    values = set(row.items())
    return values | set(combinations(sorted((features(row) if features else row).items()), 2))
