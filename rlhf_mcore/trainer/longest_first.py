"""Deals prompts to engines by how long their responses will be: beforehand, or as engines have room."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.trainer.dealing import Take, take_at_once


class Claims(Protocol):
    """Counts for all ranks together."""

    def begin(self) -> None:
        """Count from 0 again. Every rank calls it equally often."""
        ...

    def claim(self, count: int) -> int:
        """The first of ``count`` numbers that no other engine gets; the same on every rank of an engine."""
        ...


@dataclass(slots=True)
class _SharedQueue:
    """A queue from which the engine takes that has room first."""

    waiting: deque[int]
    claims: Claims
    num_samples: int
    most: int  # responses that an engine draws at a time
    first: int = 0  # the number of ``waiting[0]``

    def take(self, num_in_flight: int) -> list[int]:
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


def share_by_length(
    expected: Sequence[float], num_samples: int, engine: EngineRank, claims: Claims | None, max_in_flight: int
) -> Take:
    """Decide what this engine draws of prompts with ``expected`` lengths, the longest first: with ``claims`` from a shared queue.

    Without, engines expect equally much.
    """
    longest_first = sorted(range(len(expected)), key=lambda place: -expected[place])
    if claims is None:
        loads: list[tuple[float, int]] = [(0.0, index) for index in range(engine.num_engines)]
        shares: list[list[int]] = [[] for _ in loads]
        for place in longest_first:
            load, index = loads[0]
            shares[index].append(place)
            heapq.heapreplace(loads, (load + expected[place], index))
        return take_at_once(shares[engine.engine_index])
    claims.begin()
    even = -(-len(expected) // engine.num_engines) * num_samples
    return _SharedQueue(deque(longest_first), claims, num_samples, min(max_in_flight, even)).take
