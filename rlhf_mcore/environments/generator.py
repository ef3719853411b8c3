"""A generator that runs episodes on an engine in the trainer's process."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rlhf_mcore.sampling.requests import episode_request
from rlhf_mcore.types import Completion, Request

if TYPE_CHECKING:
    from rlhf_mcore.episode_driver import EpisodeDriver
    from rlhf_mcore.protocols import Generator
    from rlhf_mcore.sampling.policy import Policy
    from rlhf_mcore.sampling.rollouts import Context
    from rlhf_mcore.types import Prompt, Trajectory

# An episode may have several turns in flight. The id of a turn is then the episode's id plus a multiple of this number.
TURNS = 2**40


async def sample_episode(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
    """Run an episode on an engine of the class ``EpisodeGenerator``."""
    completion = await policy._engine.sample(episode_request(ctx.job))
    assert completion.trajectory is not None, "the engine plays episodes"
    return completion.trajectory


class EpisodeGenerator:
    """A Generator for episode requests. While some episodes wait for their environment, the engine samples turns of others.

    Args:
        engine: engine of this rank. It receives no other requests.
        episodes: episode driver.
    """

    def __init__(self, engine: Generator, episodes: EpisodeDriver) -> None:
        self._engine, self._episodes = engine, episodes
        self._open: set[int] = set()
        if hasattr(engine, "drawn"):  # an engine in another process reports whole turns only
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
        self._open |= {request.request_id for request in requests}
        self._episodes.begin(requests)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return the episodes that ended since the last call.

        Waits without a limit until an episode ends; ``timeout_s`` is not used.

        Raises:
            ConfigError: an environment failed, and ``reward.on_error`` is fail.
        """
        episodes, ended = self._episodes, list[Completion]()
        try:
            while self._open:
                turns = self._due(ended)
                self._engine.cancel(episodes.abandoned_turns())
                self._engine.submit(turns)
                self._open -= {completion.request_id for completion in ended}
                if ended:
                    break
                # If an environment works, the batch composition depends on timing.
                ended += episodes.take(self._engine.collect(0.0 if episodes.num_waiting else math.inf))
            while not self._open and self._engine.num_in_flight:  # turns whose client disconnected
                self._engine.collect(math.inf)
        except BaseException:
            self._open.clear()
            episodes.abandon()
            raise
        return ended

    def _due(self, ended: list[Completion]) -> list[Request]:
        """Return the turns to sample, and append the episodes that ended to ``ended``."""
        turns = None
        while turns is None and not ended:
            turns = self._episodes.due(self._engine.num_in_flight > 0, None)
            ended += self._episodes.take([])
        return turns or []

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop episodes. Unknown ids are ignored."""
        known = self._open & set(request_ids)
        self._engine.cancel(known)
        self._episodes.cancel(known)
        self._open -= known
