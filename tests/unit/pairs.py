"""Parametrize a test with a pairwise covering array of its factors instead of their product (``tests.covering``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.covering import covering_rows


def pairwise(*factors: tuple[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Return a mark whose rows contain every pair of rows of two factors.

    A factor has the form of the arguments of ``pytest.mark.parametrize``: names, separated by commas, and rows.
    """
    chosen = covering_rows({names: range(len(rows)) for names, rows in factors})
    return _mark(factors, [tuple(row[names] for names, _ in factors) for row in chosen])


def each_value(*factors: tuple[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Return a mark whose rows contain every row of every factor at least once, for factors that do not interact."""
    count = max(len(rows) for _, rows in factors)
    return _mark(factors, [tuple(number % len(rows) for _, rows in factors) for number in range(count)])


def _mark(factors: Sequence[tuple[str, Sequence[Any]]], chosen: Sequence[tuple[int, ...]]) -> pytest.MarkDecorator:
    names = [name.strip() for listed, _ in factors for name in listed.split(",")]
    rows: list[Any] = []
    for numbers in chosen:
        values: list[Any] = []
        for (listed, given), number in zip(factors, numbers, strict=True):
            values += list(given)[number] if "," in listed else [list(given)[number]]
        rows.append(tuple(values) if len(names) > 1 else values[0])
    return pytest.mark.parametrize(names, rows)
