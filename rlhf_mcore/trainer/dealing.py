"""Deal the prompts of a step to engines, and order them.

The seeds of responses do not depend on either. What does, by rounding alone, is the batch that an engine computes them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.trainer.longest_first import share_evenly, share_queue
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from rlhf_mcore.trainer.longest_first import Claims

IN_ORDER, LONGEST_FIRST, SHARED_QUEUE = "in_order", "longest_first", "shared_queue"
_ROWS = 65536  # whose lengths are known: a checkpoint has them in JSON


class ExpectedLengths:
    """Tokens of the longest response to a prompt: as many as last time, or as the mean over prompts of its data source.

    Equal on all ranks, which get the same prompts and lengths.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # the last ones seen
        self._sources: dict[str, tuple[int, int]] = {}  # sum and count

    def note(self, prompts: Sequence[Prompt], group_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Responses of ``lengths`` tokens were drawn, each to the prompt with its number in ``prompts``."""
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
        """Expect lengths: a source that nobody knows may be as long as the longest. Before the first step prompts' lengths count."""
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


# Takes the number of responses that an engine draws already. Returns the places of the prompts that it begins now; []: none.
Take = Callable[[int], list[int]]


def _take_at_once(places: list[int]) -> Take:
    """Begin all of them at the first call."""
    calls = iter([places])
    return lambda num_in_flight: next(calls, [])


@dataclass(frozen=True, slots=True)
class Dealer:
    """``order``: ``rollout.order``. ``max_in_flight``: responses that an engine draws at a time. ``claims``: for a shared queue."""

    order: str = IN_ORDER
    max_in_flight: int = 1
    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    claims: Claims | None = None

    def note(self, prompts: Sequence[Prompt], group_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """See :meth:`ExpectedLengths.note`."""
        if self.order != IN_ORDER:
            self.lengths.note(prompts, group_ids, lengths)

    def share(self, prompts: Sequence[Prompt], num_samples: int, engine: EngineRank) -> Take:
        """Decide what this engine draws of a step. Every rank calls it, with the same prompts."""
        if self.order == IN_ORDER:
            return _take_at_once(list(range(engine.engine_index, len(prompts), engine.num_engines)))
        expected = list(map(self.lengths.of, prompts))
        if self.claims is None:
            return _take_at_once(share_evenly(expected, engine))
        return share_queue(expected, num_samples, engine, self.claims, self.max_in_flight).take
