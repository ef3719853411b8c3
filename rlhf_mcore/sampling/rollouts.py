"""Sample the trajectory of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_mcore.data.episodes import episode
from rlhf_mcore.sampling.policy import Policy, RolloutLimits
from rlhf_mcore.sampling.seeds import task_seed
from rlhf_mcore.types import Completion, Job, Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.sampling.engine_loop import EngineLoop

# Token ids of responses -> their texts without special tokens.
Decode = Callable[["Sequence[Sequence[int]]"], "list[str]"]


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a rollout. ``seed``: seed of its task, which is equal for all samples of a prompt."""

    job: Job
    seed: int
    limits: RolloutLimits
    decode: Decode


# (policy, prompt, context) -> the trajectory of the context's job.
RolloutFunction = Callable[["Policy", "Prompt", Context], Awaitable[Trajectory]]


def jobs_of(place: int, prompt: Prompt, sampling: Sampling, step: int) -> list[Job]:
    """Return the jobs of the prompt at index ``place``. Job numbers increase with the index, then with the sample."""
    count = sampling.num_drawn
    return [Job(place * count + sample, prompt, sample, sampling, step) for sample in range(count)]


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

    engine: EngineLoop
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
