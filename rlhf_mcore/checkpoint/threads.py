"""Threads for work on files, where there is enough of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

WORTH_BYTES = 16 * 2**20  # below it, starting threads takes longer than the work
MAX_THREADS = min(8, os.cpu_count() or 1)


def spread(function: Callable[[S], T], items: Iterable[S], num_bytes: int) -> list[T]:
    """``[function(item) for item in items]``, in threads if ``num_bytes``, what they go through together, is worth it."""
    if num_bytes < WORTH_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(function, items))
