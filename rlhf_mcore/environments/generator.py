"""A generator that runs episodes on an engine in the trainer's process."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_mcore.parallel.collectives import broadcast_json
from rlhf_mcore.types import Completion, Request

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlhf_mcore.episode_driver import EpisodeDriver
    from rlhf_mcore.protocols import Generator
    from rlhf_mcore.types import Sampling

# An episode may have several turns in flight. The id of a turn is then the episode's id plus a multiple of this number.
TURNS = 2**40


class EpisodeGenerator:
    """A Generator for episode requests. While some episodes wait for their environment, the engine samples turns of others.

    Args:
        engine: engine of this rank. It receives no other requests.
        episodes: episode driver, on the engine's lead rank only. The other ranks sample the turns that the lead rank selects.
        group: process group of the engine's ranks; None if the engine has one rank.
    """

    def __init__(
        self, engine: Generator, episodes: EpisodeDriver | None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._engine, self._episodes, self._group = engine, episodes, group
        self._open: dict[int, Sampling] = {}
        if episodes is not None and hasattr(engine, "drawn"):  # an engine in another process reports whole turns only
            episodes.watch(engine.drawn)

    @property
    def num_in_flight(self) -> int:
        """Return the number of episodes that are not collected yet."""
        return len(self._open)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate (:class:`rlhf_mcore.protocols.Generator`). No other episodes may be in flight."""
        assert not self._open, "one call at a time"
        self.submit(requests)
        completions: list[Completion] = []
        while self._open:
            completions += self.collect(math.inf)
        return completions

    def submit(self, requests: Sequence[Request]) -> None:
        """Start episodes."""
        self._open |= {request.request_id: request.sampling for request in requests}
        if self._episodes is not None:
            self._episodes.begin(requests)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return the episodes that ended since the last call; [] on ranks that do not lead.

        Waits without a limit until an episode ends; ``timeout_s`` is not used.

        Raises:
            ConfigError: an environment failed, and ``reward.on_error`` is fail.
        """
        episodes, ended = self._episodes, list[Completion]()
        try:
            while self._open:
                turns = self._due(ended) if episodes is not None else []
                unheard = list(episodes.abandoned_turns()) if episodes is not None else []
                ended_ids = [completion.request_id for completion in ended]
                turns, unheard, ended_ids = self._agree(turns, unheard, ended_ids)
                self._engine.cancel(unheard)
                self._engine.submit(turns)
                for request_id in ended_ids:
                    del self._open[request_id]
                if ended_ids:
                    break
                waits = episodes is not None and episodes.num_waiting  # then the batch composition depends on timing
                drawn = self._engine.collect(0.0 if waits else math.inf)
                ended += episodes.take(drawn) if episodes is not None else []
            while not self._open and self._engine.num_in_flight:  # turns whose client disconnected
                self._engine.collect(math.inf)
        except BaseException:
            self._open.clear()
            if episodes is not None:
                episodes.abandon()
            raise
        return ended

    def _due(self, ended: list[Completion]) -> list[Request]:
        """Return the turns to sample, and append the episodes that ended to ``ended``."""
        assert self._episodes is not None
        turns = None
        while turns is None and not ended:
            turns = self._episodes.due(self._engine.num_in_flight > 0, None)
            ended += self._episodes.take([])
        return turns or []

    def _agree(
        self, turns: list[Request], unheard: list[int], ended: list[int]
    ) -> tuple[list[Request], list[int], list[int]]:
        """Broadcast the lead rank's decisions to all ranks of the engine."""
        if self._group is None:
            return turns, unheard, ended
        plain = [(r.request_id, r.name, list(r.prompt_ids), r.sampling.max_new_tokens, r.seed) for r in turns]
        plain, unheard, ended = broadcast_json((plain, unheard, ended), 0, self._group)
        agreed = [
            Request(key, name, prompt_ids, replace(self._open[key % TURNS], max_new_tokens=limit), seed)
            for key, name, prompt_ids, limit, seed in plain
        ]
        return agreed, unheard, ended

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop episodes. Unknown ids are ignored."""
        known = self._open.keys() & set(request_ids)
        self._engine.cancel(known)
        if self._episodes is not None:
            self._episodes.cancel(known)
        for request_id in known:
            del self._open[request_id]
