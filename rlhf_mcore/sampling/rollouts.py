"""Sample the trajectory of a job."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mcore.data.episodes import episode
from rlhf_mcore.sampling.policy import Job, Policy
from rlhf_mcore.sampling.requests import episode_request
from rlhf_mcore.types import Completion, Prompt, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.sampling.engine_loop import EngineLoop

# Token ids of responses -> their texts without special tokens.
Decode = Callable[["Sequence[Sequence[int]]"], "list[str]"]
# (engine, job, decode function) -> the job's trajectory.
MakeRollout = Callable[["EngineLoop", Job, Decode], Coroutine[Any, Any, Trajectory]]


async def sample_single_turn(engine: EngineLoop, job: Job, decode: Decode) -> Trajectory:
    """Sample one response to a prompt."""
    completion = await Policy(engine, job).sample(job.prompt.prompt_ids, images=job.prompt.images)
    [text] = decode([completion.token_ids.tolist()])
    return episode(job.prompt, job.sample, [completion], text)


async def sample_episode(engine: EngineLoop, job: Job, decode: Decode) -> Trajectory:
    """Run an episode on an engine that plays episodes (:class:`rlhf_mcore.environments.generator.EpisodeGenerator`)."""
    completion = await engine.sample(episode_request(job.number, job.prompt, job.sample, job.sampling, job.step))
    assert completion.trajectory is not None, "the engine plays episodes"
    return completion.trajectory


def build_trajectories(
    asked: Sequence[tuple[Prompt, int]], completions: Sequence[Completion], decode: Decode
) -> list[Trajectory]:
    """Build the trajectory of each completion. ``asked``: prompt and sample of each completion.

    Completions of multi-turn episodes already contain a trajectory.
    """
    single = [completion.token_ids.tolist() for completion in completions if completion.trajectory is None]
    texts = iter(decode(single) if single else [])
    return [
        completion.trajectory or episode(prompt, sample, [completion], next(texts))
        for (prompt, sample), completion in zip(asked, completions, strict=True)
    ]
