"""This rank's engine in an environment: a response to a prompt is an episode of several turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.parallel.collectives import broadcast_json
from rlhf_mcore.trainer.rollouts import Rollouts, RolloutWorker, number_occurrences
from rlhf_mcore.types import Prompt, Request, Sampling, Trajectory

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlhf_mcore.environments.episodes import Episodes


@dataclass(frozen=True, slots=True)
class EpisodeWorker(RolloutWorker):
    """Hundreds of episodes on one engine: while some wait for their environment, the engine draws the turns of others.

    Args:
        episodes: on the rank that leads the engine; others draw what it decides.
        group: of the ranks of the engine, where there are several.
        overlap: the engine draws while environments compute. Which requests it draws together then depends on the time, and so may
            the last bits of logprobs; without it, nothing does.
    """

    episodes: Episodes | None = None
    group: dist.ProcessGroup | None = None
    overlap: bool = False

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        finished: Callable[[int, list[Trajectory]], None] = lambda position, trajectories: None,
    ) -> Rollouts:
        """See :meth:`RolloutWorker.rollouts`. A prompt is finished when all of its episodes are.

        Raises:
            ConfigError: an environment failed, and ``reward.on_error`` is fail.
        """
        numbered = number_occurrences(prompts)
        mine = list(range(self.engine.engine_index, len(prompts), self.engine.num_engines))
        groups = self._draw(
            [numbered[position] for position in mine], sampling, step, lambda place, group: finished(mine[place], group)
        )
        positions = [mine[place] for place in sorted(groups) for _ in groups[place]]
        return Rollouts(positions, [trajectory for place in sorted(groups) for trajectory in groups[place]])

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """``sampling.n`` episodes from each prompt, in this order; [] on ranks that do not lead their engine."""
        groups = self._draw(prompts, sampling, step, lambda place, group: None)
        return [trajectory for place in sorted(groups) for trajectory in groups[place]]

    def _draw(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        step: int,
        finished: Callable[[int, list[Trajectory]], None],
    ) -> dict[int, list[Trajectory]]:
        """By place of their prompt the episodes, in the order of their samples."""
        drawn: dict[int, dict[int, Trajectory]] = {}
        episodes = self.episodes
        asked: list[Request] | None = None
        try:
            if episodes is not None:
                for place, prompt in enumerate(prompts):
                    for sample in range(sampling.n):
                        episodes.begin(place * sampling.n + sample, prompt, sample, sampling, step)
            while (asked := self._agreed(sampling)) is not None:
                self.generator.submit(asked)
                waits = episodes is not None and self.overlap and episodes.num_waiting
                for completion in self.generator.collect(0.0 if waits else math.inf):
                    assert episodes is not None, "only the lead rank is given completions"
                    episodes.take(completion)
                for key, trajectory in episodes.finished() if episodes is not None else ():
                    place, sample = divmod(key, sampling.n)
                    drawn.setdefault(place, {})[sample] = trajectory
                    if len(drawn[place]) == sampling.n:
                        finished(place, [each for _, each in sorted(drawn[place].items())])
        finally:
            if episodes is not None and episodes.num_open:  # it was interrupted
                episodes.abandon()
        return {place: [each for _, each in sorted(group.items())] for place, group in drawn.items()}

    def _agreed(self, sampling: Sampling) -> list[Request] | None:
        """What all ranks of the engine draw next; None where all episodes have ended and were returned."""
        told = self._next() if self.episodes is not None else None
        if self.group is None:
            return told
        plain = None
        if told is not None:
            plain = [(r.request_id, r.name, list(r.prompt_ids), r.sampling.max_new_tokens, r.seed) for r in told]
        heard = broadcast_json(plain, 0, self.group)
        if heard is None:
            return None
        return [
            Request(key, name, prompt_ids, replace(sampling, max_new_tokens=limit), seed)
            for key, name, prompt_ids, limit, seed in heard
        ]

    def _next(self) -> list[Request] | None:
        episodes = self.episodes
        assert episodes is not None
        while episodes.num_waiting:
            busy = self.generator.num_in_flight or episodes.has_requests
            episodes.poll(0.0 if self.overlap and busy else None)
            if self.overlap and busy:
                break
        if episodes.num_open or episodes.has_finished:
            return episodes.requests()
        return None
