"""The interface of the policy for rollouts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.sampling.episode_log import EpisodeLog
from rlhf_mcore.sampling.seeds import request_seed, turn_seed
from rlhf_mcore.types import Completion, Job, Request

if TYPE_CHECKING:
    from rlhf_mcore.sampling.engine_loop import EngineLoop, OnTokens


def request_of(job: Job) -> Request:
    """Build the request for the first turn of a job."""
    prompt, sampling = job.prompt, job.sampling
    # Repeated occurrences of a prompt use the seeds of further samples. The second occurrence starts at sample ``sampling.n``.
    seed = request_seed(sampling.seed, job.step, prompt.index, prompt.occurrence * sampling.n + job.sample)
    return Request(job.number, job.name, prompt.prompt_ids, sampling.of_sample(job.sample), seed, images=prompt.images)


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of a rollout.

    ``max_tokens`` counts all tokens after the prompt, including tokens that the policy has not sampled. ``max_total`` limits a whole
    sequence, including its prompt.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    max_seconds: float | None = None
    max_total: int | None = None


class Policy:
    """Samples the turns of one rollout. The job and the turn number determine the seed of a turn.

    ``num_turns`` counts the requested turns. ``log`` stores their times.
    """

    def __init__(self, engine: EngineLoop, job: Job, limits: RolloutLimits) -> None:
        self._engine, self._job, self._limits = engine, job, limits
        self._began = time.monotonic()
        self._first = request_of(job)
        self.num_turns, self.log = 0, EpisodeLog()

    def reached_limit(self, num_turns: int = 1) -> str:
        """Return the limit that forbids ``num_turns`` further turns: "turns", "seconds", or "" if they are allowed."""
        most, seconds = self._limits.max_turns, self._limits.max_seconds
        if most is not None and self.num_turns + num_turns > most:
            return "turns"
        if seconds is not None and time.monotonic() - self._began >= seconds:
            return "seconds"
        return ""

    def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: tuple[str, ...] = (),
        asked_at: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Awaitable[Completion]:
        """Sample a turn after ``tokens``. The order of the calls determines the turn numbers.

        Args:
            max_tokens: limit for the tokens of the turn, in addition to the limit of the job's sampling.
            images: digests of the images, in the order of their tokens.
            asked_at: ``time.monotonic`` of the client's request, for the log.
            on_tokens: receives the tokens of the turn so far, while it is sampled.

        Raises:
            RuntimeError: the response is not valid for training.
        """
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        request = replace(self._first, prompt_ids=tokens, images=images)
        if turn:
            request = replace(request, name=f"{request.name}, turn {turn}", seed=self.seed_of(turn))
        if max_tokens is not None:
            most = min(request.sampling.max_new_tokens, max_tokens)
            request = replace(request, sampling=replace(request.sampling, max_new_tokens=most))
        self.log.begin_turn(turn, asked_at)
        return self._sample(turn, request, on_tokens)

    async def _sample(self, turn: int, request: Request, on_tokens: OnTokens | None) -> Completion:
        num_cached = len(request.prompt_ids) if turn else 0
        completion = await self._engine.sample(request, on_tokens, num_cached)
        self.log.end_turn(turn)
        return completion

    def seed_of(self, turn: int) -> int:
        """Return the seed of a turn."""
        return turn_seed(self._first.seed, turn) if turn else self._first.seed

    def restart(self) -> None:
        """Begin again at turn 0 with an empty log. ``max_seconds`` still counts from the first start."""
        self.num_turns, self.log = 0, EpisodeLog()
