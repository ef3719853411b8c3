"""Deals prompts to engines by how long their responses will be: beforehand, or as engines have room."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_mcore.protocols import EngineRank


class Claims(Protocol):
    """Counts for all ranks together."""

    def begin(self) -> None:
        """Count from 0 again. Every rank calls it equally often."""
        ...

    def claim(self, count: int) -> int:
        """Claim ``count`` numbers that no other engine gets, and return the first; the same on every rank of an engine."""
        ...


@dataclass(slots=True)
class SharedQueue:
    """A queue from which the engine takes that has room first."""

    waiting: deque[int]
    claims: Claims
    num_samples: int
    most: int  # responses that an engine draws at a time
    first: int = 0  # the number of ``waiting[0]``

    def take(self, num_in_flight: int) -> list[int]:
        """Return the places of the prompts that the engine begins now."""
        room = (self.most - num_in_flight) // self.num_samples
        count = room if num_in_flight else max(room, 1)
        if count < 1 or not self.waiting:
            return []
        claimed = self.claims.claim(count)
        for _ in range(min(claimed - self.first, len(self.waiting))):  # which others have
            self.waiting.popleft()
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.first = claimed + count
        return taken


def share_evenly(expected: Sequence[float], engine: EngineRank) -> list[int]:
    """Return the places of the prompts that this engine draws, the longest first: engines expect equally much."""
    loads: list[tuple[float, int]] = [(0.0, index) for index in range(engine.num_engines)]
    shares: list[list[int]] = [[] for _ in loads]
    for place in _longest_first(expected):
        load, index = loads[0]
        shares[index].append(place)
        heapq.heapreplace(loads, (load + expected[place], index))
    return shares[engine.engine_index]


def share_queue(
    expected: Sequence[float], num_samples: int, engine: EngineRank, claims: Claims, max_in_flight: int
) -> SharedQueue:
    """Return the queue of all prompts, the longest first. Every rank calls it, with the same lengths."""
    claims.begin()
    even = -(-len(expected) // engine.num_engines) * num_samples
    return SharedQueue(deque(_longest_first(expected)), claims, num_samples, min(max_in_flight, even))


def _longest_first(expected: Sequence[float]) -> list[int]:
    return sorted(range(len(expected)), key=lambda place: -expected[place])
