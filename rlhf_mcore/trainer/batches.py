"""The batches of synchronous reinforcement learning: sample the prompts of a step, score the responses, build the rows."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.coroutines import run
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.protocols import AsyncEngine, EngineRank, StepwiseEngine
from rlhf_mcore.sampling.engine_loop import EngineLoop
from rlhf_mcore.sampling.followers import follow, run_pass
from rlhf_mcore.sampling.rollouts import (
    Decode,
    LocalPlayer,
    RolloutSetup,
    jobs_of,
    number_occurrences,
    sampling_of_batch,
)
from rlhf_mcore.sampling.served_loop import RolloutLoop, ServedLoop
from rlhf_mcore.trainer.dealing import Dealer
from rlhf_mcore.trainer.metrics import draft_metrics, rollout_metrics, source_metrics
from rlhf_mcore.types import DRAFTS, Job, Prompt, Sampling, Score, Trajectory

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlhf_mcore.data.source import PromptBatches
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.trainer.record import RunRecord
    from rlhf_mcore.types import TrainBatch

T = TypeVar("T")
# Trajectories -> a future of their scores, in order. The scores are computed in the background.
BeginScores = Callable[[Sequence[Trajectory]], Future[list[Score]]]
# (trajectories sampled by this rank, their scores by graders) -> the scores with a reward model's score added.
AddScores = Callable[[Sequence[Trajectory], list[Score]], list[Score]]


def keep_scores(trajectories: Sequence[Trajectory], scores: list[Score]) -> list[Score]:
    """Return the scores unchanged."""
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """The responses to a prompt, whose scores are being computed. ``place``: index of the prompt among the prompts of the batch."""

    place: int
    trajectories: list[Trajectory]  # by sample number
    scores: Future[list[Score]]  # in the order of the trajectories


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A scored trajectory. ``place`` is the index of its prompt among the prompts of the batch."""

    place: int
    trajectory: Trajectory
    score: Score


@dataclass(slots=True)
class SampledBatch:
    """The prompts of a step or of one batch within it, and the rollouts that this rank sampled for them.

    ``prompts`` are the same on every rank. ``rollouts`` is empty on ranks that do not lead an engine.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    greedy: list[Rollout] = field(default_factory=list)  # baselines, not trained on
    left_out: list[Score] = field(default_factory=list)  # scores of rollouts whose prompts were removed from the step
    num_batches: int = 1  # batches sampled for the step; it consumes the prompts of all of them
    num_generated: int = 0  # candidate prompts of dynamic sampling; 0: the step does not select prompts
    num_informative: int = 0  # candidate prompts whose responses differ in score

    def keep(self, places: Sequence[int]) -> SampledBatch:
        """Return the batch with only the prompts at ``places``, in this order. Rollouts of other prompts are removed."""
        new_place = {old: new for new, old in enumerate(places)}
        return replace(
            self,
            prompts=[self.prompts[place] for place in places],
            rollouts=_renumber(self.rollouts, new_place),
            greedy=_renumber(self.greedy, new_place),
        )

    def separate_greedy(self, num_samples: int) -> SampledBatch:
        """Return the batch with rollouts of sample number ``num_samples`` or higher moved to ``greedy``."""
        return replace(
            self,
            rollouts=[rollout for rollout in self.rollouts if rollout.trajectory.sample < num_samples],
            greedy=[rollout for rollout in self.rollouts if rollout.trajectory.sample >= num_samples],
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the prompt selection, or {} if the step selected no prompts."""
        if not self.num_generated:
            return {}
        return {
            "rollout/num_batches": float(self.num_batches),
            "rollout/informative_fraction": self.num_informative / self.num_generated,
        }


def _renumber(rollouts: Sequence[Rollout], new_place: dict[int, int]) -> list[Rollout]:
    return [replace(rollout, place=new_place[rollout.place]) for rollout in rollouts if rollout.place in new_place]


# (number of missing prompts of the step, 0 at its start; index of the batch within the step) -> more prompts with their rollouts:
# the missing number, or a whole batch. Collective.
SampleBatch = Callable[[int, int], SampledBatch]
# Fills a step with prompts. Collective.
FillStep = Callable[[SampleBatch], SampledBatch]


def take_next_batch(sample: SampleBatch) -> SampledBatch:
    """Fill a step with the next batch of prompts, regardless of the scores."""
    return sample(0, 0)


@dataclass(frozen=True, slots=True)
class ColocatedBatches:
    """Synchronous batches: each step samples its own responses. Finished responses are scored while others are sampled.

    ``add_model`` adds the scores of a reward model, which needs the device, to the scores of graders. Collective.
    ``pop_preemptions`` returns the preemptions of this rank's engine since the last call; None if the engine does not count them.
    """

    prompt_source: PromptBatches
    sampler: BatchSampler
    sampling: Sampling
    begin_scores: BeginScores
    fill_step: FillStep
    exchange: RowExchange
    recorder: RunRecord
    add_model: AddScores = keep_scores
    pop_preemptions: Callable[[], int] | None = None

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the scored rows of a step and their metrics. Collective over the world."""
        sampled = self.fill_step(lambda _missing, number: self._sample(step, number))
        batch, metrics = scored_batch(step, sampled, self.exchange, self.recorder, self.sampler.dealer.note)
        if self.pop_preemptions is not None:
            metrics["rollout/preemptions"] = float(sum(all_gather_json(self.pop_preemptions())))
        return batch, metrics

    def _sample(self, step: int, number: int) -> SampledBatch:
        """Sample and score batch ``number`` of a step."""
        prompts = self.prompt_source.next_batch()
        progress = _Progress(self.recorder.progress)
        with self.recorder.phase("generate"):
            self.recorder.progress(f"{len(prompts) * self.sampling.num_responses} responses to {len(prompts)} prompts")
            sampling = sampling_of_batch(self.sampling, number)
            groups = self.sampler.sample_step(
                prompts, sampling, step=step, begin_scores=self.begin_scores, progress=progress.add
            )
        with self.recorder.phase("score"):
            return SampledBatch(prompts, scored_rollouts(groups, self.add_model))


@dataclass(slots=True)
class _Progress:
    """Shows the number and the longest length of a batch's finished responses."""

    show: Callable[[str], None]
    count: int = 0
    longest: int = 0

    def add(self, trajectories: Sequence[Trajectory], num_waiting: int) -> None:
        """Count finished responses. ``num_waiting``: the engine's responses in flight."""
        self.count += len(trajectories)
        self.longest = max(self.longest, *(trajectory.num_sampled for trajectory in trajectories))
        self.show(f"{self.count} finished · {num_waiting} waiting · longest {self.longest:,} tokens")


def scored_rollouts(groups: Sequence[SampledGroup], add_model: AddScores = keep_scores) -> list[Rollout]:
    """Wait for the scores of groups, and return their rollouts in order. ``add_model`` may make it collective over the world."""
    placed = [(group.place, trajectory) for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.scores.result()]
    scores = add_model([trajectory for _, trajectory in placed], scores)
    return [Rollout(*each, score) for each, score in zip(placed, scores, strict=True)]


def scored_batch(
    step: int,
    sampled: SampledBatch,
    exchange: RowExchange,
    recorder: RunRecord,
    note_lengths: Callable[[Sequence[Prompt], Sequence[int], Sequence[int]], None] = lambda *_: None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the rows of a step, built from the rollouts of every rank, and their metrics. Collective over the world."""
    if exchange.baselines:
        sampled = sampled.separate_greedy(exchange.samples_per_prompt)
    recorder.rollouts(step, sampled.rollouts)
    with recorder.phase("exchange"):
        batch, facts = exchange(sampled)
    assert batch.prompts is not None
    note_lengths(batch.prompts, batch.group_ids.tolist(), batch.num_sampled.tolist())
    metrics = sampled.metrics() | rollout_metrics(batch, facts) | source_metrics(batch, facts)
    if DRAFTS in batch.fields:
        metrics |= draft_metrics(batch.fields.pop(DRAFTS))
    return batch, metrics


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """Samples trajectories with this rank's engine.

    Args:
        engine, rank: the engine of this rank, and this rank's position in the engine.
        setup: how the lead rank runs rollouts.
        ranks: process group of the engine's ranks; None if the engine runs on one rank.
        wait: waits until all ranks finish sampling, without a timeout. Collective over the world.
    """

    engine: StepwiseEngine | AsyncEngine
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
        begin_scores: BeginScores,
        progress: Callable[[Sequence[Trajectory], int], None] = lambda *_: None,
    ) -> list[SampledGroup]:
        """Sample this engine's share of the responses to the prompts of a whole step. Collective over the world.

        ``dealer`` assigns each prompt to one engine. This engine samples all responses to the prompt, so they share the prompt's
        KV cache. Repeated prompts are numbered, so they get different responses. When the last response to a prompt has finished,
        the scores of its responses begin, and ``progress`` receives the responses and the engine's number of responses in flight.

        Returns:
            The groups of this engine, sorted by the index of their prompt in ``prompts``. Ranks that do not lead an engine get [].

        Raises:
            LostTrajectory: a response is missing, duplicated, or was not requested.
            RuntimeError: a response is not valid for training.
        """
        numbered = number_occurrences(prompts)

        async def sample_group(engine: RolloutLoop, place: int) -> SampledGroup:
            jobs = jobs_of([numbered[place]], sampling, step, first=place)
            trajectories = await self._run_rollouts(engine, jobs)
            group = SampledGroup(place, trajectories, begin_scores(trajectories))
            progress(trajectories, engine.num_in_flight)
            return group

        async def sample_share(engine: RolloutLoop) -> list[SampledGroup]:
            share = self.dealer.share(numbered, sampling.num_responses, self.rank)
            groups = []
            while not share.is_empty:
                groups += [engine.begin(sample_group(engine, place)) for place in share.take(engine.num_in_flight)]
                if not share.is_empty:
                    await engine.next_pass()
            return await engine.join(groups)

        groups = self._run(sample_share)
        self.wait()
        return sorted(groups, key=lambda group: group.place)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Return all responses to each prompt, in prompt order. Returns [] on ranks that do not lead their engine.

        Raises:
            LostTrajectory, RuntimeError: same conditions as in ``sample_step``.
        """
        jobs = jobs_of(prompts, sampling, step)
        return self._run(lambda engine: self._run_rollouts(engine, jobs))

    async def _run_rollouts(self, engine: RolloutLoop, jobs: Sequence[Job]) -> list[Trajectory]:
        return await engine.join(LocalPlayer(engine, self.decode, self.setup).begin(jobs))

    def _run(self, sample: Callable[[RolloutLoop], Coroutine[Any, Any, list[T]]]) -> list[T]:
        """Run ``sample`` on the engine's lead rank while its other ranks follow. Returns [] on the other ranks."""
        in_order, places = self.setup.in_order, self.setup.places
        engine: RolloutLoop
        if isinstance(self.engine, AsyncEngine):
            engine = ServedLoop(self.engine, places)
        else:
            passes = partial(run_pass, self.engine, self.ranks)
            engine = EngineLoop(self.engine, passes, in_order=in_order, until_finished=in_order, places=places)
        with preserved_rng():  # vLLM's sampler also uses torch's global generator
            if self.rank.is_lead:
                return run(engine.run(sample(engine)))
            if self.ranks is not None and not isinstance(self.engine, AsyncEngine):
                follow(self.engine, self.ranks)
            return []
