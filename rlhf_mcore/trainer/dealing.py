"""Assign the prompts of a step to engines, and order them.

The seeds of responses do not depend on assignment or order. The engine's batches do, so responses may differ by rounding.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from rlhf_mcore.parallel.collectives import StoreClaims

IN_ORDER, LONGEST_FIRST, SHARED_QUEUE = "in_order", "longest_first", "shared_queue"
_ROWS = 65536  # limit of stored lengths, because a checkpoint stores them as JSON


class ExpectedLengths:
    """Expected tokens of the longest response to a prompt: the last length, or else the mean of its data source.

    The state is equal on all ranks, because all ranks get the same prompts and lengths.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # the most recent rows
        self._sources: dict[str, tuple[int, int]] = {}  # sum and count

    def note(self, prompts: Sequence[Prompt], group_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Store the ``lengths`` of sampled responses. ``group_ids``: index in ``prompts`` of each response's prompt."""
        longest = [0] * len(prompts)
        for place, length in zip(group_ids, lengths, strict=True):
            longest[place] = max(longest[place], length)
        for prompt, length in zip(prompts, longest, strict=True):
            self._rows.pop(prompt.index, None)
            self._rows[prompt.index] = length
            total, count = self._sources.get(prompt.data_source, (0, 0))
            self._sources[prompt.data_source] = total + length, count + 1
        for index in list(self._rows)[: max(len(self._rows) - _ROWS, 0)]:
            del self._rows[index]

    def of(self, prompt: Prompt) -> float:
        """Return the expected length for a prompt.

        An unknown source gets the mean of the longest source. Before the first step, the length of the prompt is used.
        """
        if prompt.index in self._rows:
            return float(self._rows[prompt.index])
        if prompt.data_source in self._sources:
            return _mean(self._sources[prompt.data_source])
        return max(map(_mean, self._sources.values()), default=float(len(prompt.prompt_ids)))

    def state_dict(self) -> dict[str, Any]:
        """See :class:`rlhf_mcore.checkpoint.registry.Stateful`."""
        return {"rows": list(map(list, self._rows.items())), "sources": {k: list(v) for k, v in self._sources.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :class:`rlhf_mcore.checkpoint.registry.Stateful`."""
        self._rows = {int(index): int(length) for index, length in state["rows"]}
        self._sources = {str(name): (int(total), int(count)) for name, (total, count) in state["sources"].items()}


def _mean(length: tuple[int, int]) -> float:
    return length[0] / length[1]


@dataclass(slots=True)
class FixedShare:
    """A share that is fixed in advance. The engine starts all of its prompts at once."""

    places: list[int]

    @property
    def is_empty(self) -> bool:
        """Return whether no prompt remains for the engine."""
        return not self.places

    def take(self, num_in_flight: int) -> list[int]:
        """Return the indices of the prompts to start now. ``num_in_flight``: the engine's unfinished responses."""
        taken, self.places = self.places, []
        return taken


@dataclass(slots=True)
class QueuedShare:
    """A queue of all prompts. The first engine with free slots takes the next prompts. ``slots``: limit of responses in flight."""

    waiting: deque[int]
    claims: StoreClaims
    num_samples: int
    slots: int
    first: int = 0  # the number of ``waiting[0]``

    @property
    def is_empty(self) -> bool:
        """Return whether no prompt remains for the engine."""
        return not self.waiting

    def take(self, num_in_flight: int) -> list[int]:
        """Return the indices of the prompts to start now. ``num_in_flight``: the engine's unfinished responses.

        The engine claims the number of prompts that fit into its free slots. An idle engine claims at least one.
        """
        free = (self.slots - num_in_flight) // self.num_samples
        count = free if num_in_flight else max(free, 1)
        if count < 1 or not self.waiting:
            return []
        claimed = self.claims.claim(count)
        for _ in range(min(claimed - self.first, len(self.waiting))):  # claimed by other engines
            self.waiting.popleft()
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        self.first = claimed + count
        return taken


@dataclass(frozen=True, slots=True)
class Dealer:
    """Assigns prompts to engines.

    ``order``: ``rollout.order``. ``max_in_flight``: slots of an engine. ``claims``: counter of a shared queue.
    """

    order: str = IN_ORDER
    max_in_flight: int = 1
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    claims: StoreClaims | None = None

    def note(self, prompts: Sequence[Prompt], group_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """See :meth:`ExpectedLengths.note`."""
        if self.order != IN_ORDER:
            self.lengths.note(prompts, group_ids, lengths)

    def share(self, prompts: Sequence[Prompt], num_samples: int, engine: EngineRank) -> FixedShare | QueuedShare:
        """Return this engine's share of a step. The lead rank of every engine calls it with the same prompts."""
        if self.order == IN_ORDER:
            return FixedShare(list(range(engine.engine_index, len(prompts), engine.num_engines)))
        expected = list(map(self.lengths.of, prompts))
        if self.claims is None:
            return FixedShare(share_evenly(expected, engine))
        self.claims.begin()
        even = -(-len(prompts) // engine.num_engines) * num_samples
        return QueuedShare(deque(_longest_first(expected)), self.claims, num_samples, min(self.max_in_flight, even))


def share_evenly(expected: Sequence[float], engine: EngineRank) -> list[int]:
    """Return the indices of this engine's prompts, longest first. The total expected length is about equal for all engines."""
    loads: list[tuple[float, int]] = [(0.0, index) for index in range(engine.num_engines)]
    shares: list[list[int]] = [[] for _ in loads]
    for place in _longest_first(expected):
        load, index = loads[0]
        shares[index].append(place)
        heapq.heapreplace(loads, (load + expected[place], index))
    return shares[engine.engine_index]


def _longest_first(expected: Sequence[float]) -> list[int]:
    return sorted(range(len(expected)), key=lambda place: -expected[place])
