"""Sample the trajectory of a job: the jobs of a prompt, the turns of a rollout, and their seeds."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_mcore.data.episodes import episode
from rlhf_mcore.sampling.episode_log import EpisodeLog
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.sampling.engine_loop import OnTokens
    from rlhf_mcore.sampling.served_loop import RolloutLoop

_SEED_BITS = 63  # torch.Generator and vLLM both take any non-negative int64
# Token ids of responses -> their texts without special tokens.
Decode = Callable[[Sequence[Sequence[int]]], list[str]]


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


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a rollout. ``seed``: seed of its task, which is equal for all samples of a prompt."""

    job: Job
    seed: int
    limits: RolloutLimits
    decode: Decode


# (policy, prompt, context) -> the trajectory of the context's job.
RolloutFunction = Callable[["Policy", Prompt, Context], Awaitable[Trajectory]]


def jobs_of(prompts: Sequence[Prompt], sampling: Sampling, step: int, *, first: int = 0) -> list[Job]:
    """Return the jobs of prompts. Their numbers increase with the prompt, then with the sample.

    ``first``: index of the first prompt, for its job numbers.
    """
    count = sampling.num_responses
    return [
        Job(place * count + sample, prompt, sample, sampling, step)
        for place, prompt in enumerate(prompts, first)
        for sample in range(count)
    ]


def sampling_of_batch(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling parameters of batch ``number`` of a step. The first batch keeps the seed; later batches get other seeds.

    If the data set is smaller than the batches of a step, a prompt occurs again. It must not get the same responses.
    """
    return replace(sampling, seed=sampling.seed + (number << 32))


def number_occurrences(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with ``occurrence`` set to the number of earlier prompts with the same row."""
    seen: Counter[int] = Counter()
    numbered = []
    for prompt in prompts:
        numbered.append(replace(prompt, occurrence=seen[prompt.index]) if seen[prompt.index] else prompt)
        seen[prompt.index] += 1
    return numbered


async def sample_single_turn(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
    """Sample one response to a prompt."""
    completion = await policy.sample(prompt.prompt_ids, images=prompt.images)
    return single_turn_trajectory(ctx.job, completion, ctx.decode)


def single_turn_trajectory(job: Job, completion: Completion, decode: Decode) -> Trajectory:
    """Build the trajectory of one response."""
    [text] = decode([completion.token_ids.tolist()])
    return episode(job.prompt, job.sample, [completion], text)


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """How an engine runs its rollouts.

    ``in_order``: whether the engine waits until all rollouts wait for it. ``moves_turns``: whether other engines may sample turns for
    which the engine has no free slot. ``places``: maximum number of concurrent rollouts, for an engine in order; None: no limit.
    """

    rollout: RolloutFunction = sample_single_turn
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    in_order: bool = True
    moves_turns: bool = False
    places: int | None = None


@dataclass(frozen=True, slots=True)
class LocalPlayer:
    """Runs rollouts in the process of their engine."""

    engine: RolloutLoop
    decode: Decode
    setup: RolloutSetup = field(default_factory=RolloutSetup)

    def begin(self, jobs: Sequence[Job]) -> list[asyncio.Task[Trajectory]]:
        """Start the rollouts of jobs, and return a task of each trajectory. The engine starts with all jobs of a call."""
        return [self.engine.begin(self._run(job)) for job in jobs]

    async def _run(self, job: Job) -> Trajectory:
        if job.is_single_turn:
            return await self._play(job, RolloutSetup())
        async with self.engine.place():
            return await self._play(job, self.setup)

    async def _play(self, job: Job, setup: RolloutSetup) -> Trajectory:
        context = Context(job, task_seed(job), setup.limits, self.decode)
        return await setup.rollout(Policy(self.engine, job, setup.limits), job.prompt, context)


class Policy:
    """Samples the turns of one rollout. The job and the turn number determine the seed of a turn.

    ``num_turns`` counts the requested turns. ``log`` stores their times.
    """

    def __init__(self, engine: RolloutLoop, job: Job, limits: RolloutLimits) -> None:
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


def request_of(job: Job) -> Request:
    """Build the request for the first turn of a job."""
    prompt, sampling = job.prompt, job.sampling
    # Repeated occurrences of a prompt use the seeds of further samples. The second occurrence starts at sample ``sampling.n``.
    seed = request_seed(sampling.seed, job.step, prompt.index, prompt.occurrence * sampling.n + job.sample)
    return Request(job.number, job.name, prompt.prompt_ids, sampling.of_sample(job.sample), seed, images=prompt.images)


# Seeds depend on the run's seed, the step, the prompt, the sample and the turn, but not on the engine.
def request_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """Derive the seed of response ``sample`` to the prompt in row ``prompt_index`` at ``step``.

    The seed is the first 63 bits of BLAKE2b over the four numbers (little-endian int64, in the order of the arguments).
    It is equal on every machine and Python version. Seeds of neighbouring prompts, samples or steps are unrelated.
    ``sample`` counts over all occurrences of the row in the step. The seed does not depend on the engine or on other requests
    in the batch.

    Raises:
        struct.error: an argument does not fit in a signed 64-bit integer.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def turn_seed(seed: int, turn: int) -> int:
    """Derive the seed of a later turn of an episode from the first turn's ``seed``. Seeds of different turns are unrelated."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8, person=b"turn").digest()
    return int.from_bytes(digest, "little") >> 1


def task_seed(job: Job) -> int:
    """Derive the seed of the environment of a job.

    All responses of a group get the same task, because their scores are compared. If a prompt occurs again in the step, its next
    group gets another seed.
    """
    return request_seed(job.sampling.seed, job.step, job.prompt.index, -1 - job.prompt.occurrence)
