"""Sample the responses to a batch of prompts with the engine of this rank."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.coroutines import run
from rlhf_mcore.protocols import EngineRank, Generator
from rlhf_mcore.sampling.engine_loop import EngineLoop
from rlhf_mcore.sampling.followers import LedEngine, follow
from rlhf_mcore.sampling.policy import Job
from rlhf_mcore.sampling.rollouts import Decode, MakeRollout, sample_single_turn
from rlhf_mcore.sampling.seeds import number_occurrences
from rlhf_mcore.trainer.dealing import Dealer
from rlhf_mcore.types import Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
# Gets the place of a prompt, its trajectories when the last one is there, and the number of others that are sampled still.
Finished = Callable[[int, "list[Trajectory]", int], None]


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """Samples trajectories with this rank's engine.

    Args:
        engine, rank: the engine of this rank, and the place of the rank in it.
        ranks: group of the engine's ranks; None if it has one.
        play: wraps the engine on its lead, to play episodes.
        wait: waits for all ranks, however long they sample. Collective over the world.
    """

    engine: Generator
    rank: EngineRank
    decode: Decode
    make_rollout: MakeRollout = sample_single_turn
    ranks: dist.ProcessGroup | None = None
    play: Callable[[Generator], Generator] = lambda engine: engine
    wait: Callable[[], object] = lambda: None
    dealer: Dealer = field(default_factory=Dealer)

    def sample_step(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        finished: Finished = lambda *_: None,
    ) -> list[tuple[int, Trajectory]]:
        """Sample this engine's share of the responses to the prompts of a whole step. Collective over the world.

        One engine, which ``dealer`` picks, samples all responses to a prompt, so that they share the prompt's cache. A prompt that
        comes again is numbered and gets other responses. ``finished`` is called while responses to other prompts are sampled.

        Returns:
            Each trajectory after the place of its prompt in ``prompts``, in the order of places and samples. Ranks that do not lead
            an engine get none.

        Raises:
            LostTrajectory: a response is missing, doubled, or was not asked for.
            RuntimeError: a response that must not be trained on.
        """
        numbered = number_occurrences(prompts)

        async def sample_group(engine: EngineLoop, place: int) -> tuple[int, list[Trajectory]]:
            jobs = _jobs_of(place, numbered[place], sampling, step)
            trajectories = await self._make_rollouts(engine, jobs)
            finished(place, trajectories, engine.num_in_flight)
            return place, trajectories

        async def sample_share(engine: EngineLoop) -> list[tuple[int, list[Trajectory]]]:
            share = self.dealer.share(numbered, sampling.num_drawn, self.rank)
            groups = []
            while not share.is_empty:
                groups += [engine.begin(sample_group(engine, place)) for place in share.take(engine.num_in_flight)]
                if not share.is_empty:
                    await engine.next_pass()
            return await engine.join(groups)

        groups = self._run(sample_share)
        self.wait()
        return [(place, trajectory) for place, trajectories in sorted(groups) for trajectory in trajectories]

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Sample all responses to each prompt, in this order. Returns [] on ranks that do not lead their engine.

        Raises:
            LostTrajectory, RuntimeError: as ``sample_step``.
        """
        jobs = [job for place, prompt in enumerate(prompts) for job in _jobs_of(place, prompt, sampling, step)]
        return self._run(lambda engine: self._make_rollouts(engine, jobs))

    async def _make_rollouts(self, engine: EngineLoop, jobs: Sequence[Job]) -> list[Trajectory]:
        return await engine.join([engine.begin(self.make_rollout(engine, job, self.decode)) for job in jobs])

    def _run(self, sample: Callable[[EngineLoop], Coroutine[Any, Any, list[T]]]) -> list[T]:
        """Run ``sample`` on the rank that leads the engine, while the other ranks follow. Returns [] on these."""
        if not self.rank.is_lead:
            if self.ranks is not None:
                follow(self.engine, self.ranks)
            return []
        led = None if self.ranks is None else LedEngine(self.engine, self.ranks)
        engine = EngineLoop(self.play(led or self.engine))
        try:
            return run(engine.run(sample(engine)))
        finally:
            if led is not None:
                led.release()


def _jobs_of(place: int, prompt: Prompt, sampling: Sampling, step: int) -> list[Job]:
    """List the rollouts of the prompt with this place. Their numbers are in the order of places and samples."""
    count = sampling.num_drawn
    return [Job(place * count + sample, prompt, sample, sampling, step) for sample in range(count)]
