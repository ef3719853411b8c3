"""Sample the responses to a batch of prompts with the engine of this rank."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.coroutines import run
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.protocols import EngineRank, StepwiseEngine
from rlhf_mcore.sampling.engine_loop import EngineLoop
from rlhf_mcore.sampling.followers import follow, run_pass
from rlhf_mcore.sampling.rollouts import Decode, LocalPlayer, RolloutSetup, jobs_of, number_occurrences
from rlhf_mcore.trainer.dealing import Dealer
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
# Receives a prompt's index and trajectories when its last response is complete, and the number of responses in flight.
Finished = Callable[[int, "list[Trajectory]", int], None]


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """Samples trajectories with this rank's engine.

    Args:
        engine, rank: the engine of this rank, and this rank's position in the engine.
        setup: how the lead rank runs rollouts.
        ranks: process group of the engine's ranks; None if the engine runs on one rank.
        wait: waits until all ranks finish sampling, without a timeout. Collective over the world.
    """

    engine: StepwiseEngine
    rank: EngineRank
    decode: Decode
    ranks: dist.ProcessGroup | None = None
    setup: RolloutSetup = field(default_factory=RolloutSetup)
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

        ``dealer`` assigns each prompt to one engine. This engine samples all responses to the prompt, so they share the prompt's
        KV cache. Repeated prompts are numbered, so they get different responses. ``finished`` is called while the engine still
        samples responses to other prompts.

        Returns:
            Pairs of the prompt's index in ``prompts`` and a trajectory, sorted by prompt index and sample number. Ranks that do
            not lead an engine get an empty list.

        Raises:
            LostTrajectory: a response is missing, duplicated, or was not requested.
            RuntimeError: a response is not valid for training.
        """
        numbered = number_occurrences(prompts)

        async def sample_group(engine: EngineLoop, place: int) -> tuple[int, list[Trajectory]]:
            jobs = jobs_of(place, numbered[place], sampling, step)
            trajectories = await self._run_rollouts(engine, jobs)
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
        """Return all responses to each prompt, in prompt order. Returns [] on ranks that do not lead their engine.

        Raises:
            LostTrajectory, RuntimeError: same conditions as in ``sample_step``.
        """
        jobs = [job for place, prompt in enumerate(prompts) for job in jobs_of(place, prompt, sampling, step)]
        return self._run(lambda engine: self._run_rollouts(engine, jobs))

    async def _run_rollouts(self, engine: EngineLoop, jobs: Sequence[Job]) -> list[Trajectory]:
        return await engine.join(LocalPlayer(engine, self.decode, self.setup).begin(jobs))

    def _run(self, sample: Callable[[EngineLoop], Coroutine[Any, Any, list[T]]]) -> list[T]:
        """Run ``sample`` on the engine's lead rank while its other ranks follow. Returns [] on the other ranks."""
        in_order = self.setup.in_order
        passes = partial(run_pass, self.engine, self.ranks)
        places = self.setup.places
        engine = EngineLoop(self.engine, passes, in_order=in_order, until_finished=in_order, places=places)
        with preserved_rng():  # vLLM's sampler also uses torch's global generator
            if self.rank.is_lead:
                return run(engine.run(sample(engine)))
            if self.ranks is not None:
                follow(self.engine, self.ranks)
            return []
