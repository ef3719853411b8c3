"""The covering arrays of the distributed tests contain every value and every pair that a valid row can have."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.covering import covering_rows


def pairs_of(rows: list[dict[str, Any]]) -> set[Any]:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (5, 3, 2), (4, 4, 4, 2, 2), (7,)])
def test_every_pair_occurs_in_few_rows(sizes: tuple[int, ...]) -> None:
    factors = {f"factor {number}": range(size) for number, size in enumerate(sizes)}
    rows = covering_rows(factors)
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    assert pairs_of(rows) == pairs_of(every)
    largest, second = sorted([*sizes, 1])[:-3:-1]
    assert largest * second <= len(rows) <= 1.5 * largest * second


def test_constraints_hold_and_impossible_pairs_are_not_required() -> None:
    factors = {"tp": (1, 2, 4), "pp": (1, 2, 4), "cut": ("one", "many")}
    rows = covering_rows(factors, lambda row: row["tp"] * row["pp"] <= 4)
    assert all(row["tp"] * row["pp"] <= 4 for row in rows)
    assert {(row["tp"], row["pp"]) for row in rows} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert {(row["tp"], row["cut"]) for row in rows} == set(product((1, 2, 4), ("one", "many")))


def test_features_are_paired_and_every_value_still_occurs() -> None:
    factors = {"layout": range(12), "cut": ("one", "many"), "owner": "abc"}
    rows = covering_rows(
        factors, features=lambda row: {"odd": row["layout"] % 2, "cut": row["cut"], "owner": row["owner"]}
    )
    assert {row["layout"] for row in rows} == set(range(12))
    assert {(row["layout"] % 2, row["owner"]) for row in rows} == set(product((0, 1), "abc"))
    assert len(rows) == 12, "fewer than the 36 pairs of layouts and owners"


def test_the_same_factors_give_the_same_rows() -> None:
    factors = {"a": ("x", "y", "z"), "b": (1, 2), "c": (None, True)}
    assert covering_rows(factors) == covering_rows(dict(factors))
