"""Pipelined training: disaggregated engines sample for future steps while the trainer trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.sampling.rollouts import jobs_of
from rlhf_mcore.trainer.batches import (
    AddScores,
    FillStep,
    SampledBatch,
    SampledGroup,
    keep_scores,
    scored_batch,
    scored_rollouts,
    take_next_batch,
)
from rlhf_mcore.types import EngineWork

if TYPE_CHECKING:
    from rlhf_mcore.sampling.rollouts import Decode
    from rlhf_mcore.trainer.ahead import BeginJobs, SamplingAhead
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.trainer.record import RunRecord
    from rlhf_mcore.types import Prompt, Sampling, TrainBatch, Trajectory

# Longest time between collectives while all ranks wait for responses. It bounds the wait of the other ranks in a collective.
TURN_S = 10.0
POLL_S = 1.0  # interval in which the first rank checks whether engines need weights
_COUNTED = (
    "rollout/in_flight",
    "rollout/redrawn",
    "rollout/other_version",
    "throughput/engine_steps",
    "throughput/engine_tokens",
    "throughput/engine_busy_s",
    "throughput/engine_lent",
    "rollout/preemptions",
)


@dataclass(frozen=True, slots=True)
class FirstRank:
    """The interfaces to the engines. They exist on the first rank only, because only this rank communicates with the engines."""

    ahead: SamplingAhead
    needs_weights: Callable[[], bool]  # whether engines wait for weights and no engine has weights
    begin: BeginJobs
    # Work of all engines since the last call, and the number of responses by another version than at their submission.
    pop_work: Callable[[], tuple[EngineWork, int]]
    num_sampled_tokens: Callable[[], int]  # total sampled tokens of all engines; changes while they make progress


def wait_together(
    first: FirstRank | None,
    is_done: Callable[[FirstRank, float], bool],
    resync: Callable[[], object],
    beat: Callable[[], object],
) -> None:
    """Wait until ``is_done`` returns true on the first rank. Collective over the world.

    ``is_done`` waits at most the given seconds. If all engines were replaced in the meantime, ``resync`` sends weights to the new
    engines. Every rank calls ``beat`` after a turn in which engines sampled tokens.
    """

    def turn(first: FirstRank) -> tuple[str, int]:
        end, answer = time.monotonic() + TURN_S, ""
        while not answer:
            left = end - time.monotonic()
            if is_done(first, min(max(left, 0.0), POLL_S)):
                answer = "done"
            elif first.needs_weights():
                answer = "publish"
            elif left <= 0:
                answer = "wait"
        return answer, first.num_sampled_tokens()

    answer, drawn = "", -1
    while answer != "done":
        answer, now = broadcast_json(on_every_rank(lambda: None if first is None else turn(first)), 0)
        if now != drawn:
            drawn = now
            beat()
        if answer == "publish":
            resync()


@dataclass(frozen=True, slots=True)
class PipelinedBatches:
    """Batches whose responses were sampled during training on earlier batches. The schedule limits the age of their policy.

    ``prompts``: all prompts of the data, on every rank. ``resync`` sends weights to new engines after all engines were replaced.
    It sends the last published weights if these are stored. Otherwise it sends the trainer's weights, with the given version.
    """

    prompts: Sequence[Prompt]
    first: FirstRank | None
    exchange: RowExchange
    recorder: RunRecord
    resync: Callable[[int], object]
    add_model: AddScores = keep_scores
    fill_step: FillStep = take_next_batch

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the scored rows of a step and their metrics. Collective over the world."""
        sampled = self.fill_step(lambda missing, _number: self._sample(step, missing))
        batch, metrics = scored_batch(step, sampled, self.exchange, self.recorder)
        counted: list[float] = []
        if (first := self.first) is not None:
            work, other = first.pop_work()
            counted = [first.ahead.num_in_flight, first.ahead.redrawn, other, *astuple(work)]
        counts = map(float, broadcast_json(counted, 0))
        return batch, {**metrics, **dict(zip(_COUNTED, counts, strict=True))}

    def _sample(self, step: int, missing: int) -> SampledBatch:
        """Take more prompts that were sampled ahead, and wait for their responses and scores."""
        first, wanted = self.first, 0
        with self.recorder.phase("generate"):
            if first is not None:
                schedule = first.ahead.schedule
                wanted = (0 if schedule.is_synchronous else missing) or schedule.prompts_per_step
                first.ahead.fill(step)
            self._wait(step - 1, lambda ahead: ahead.is_ready(wanted))
        taken = first.ahead.take(wanted) if first is not None else []
        named = broadcast_json([(group.place, group.prompt.occurrence) for group in taken], 0)
        prompts = [replace(self.prompts[place], occurrence=occurrence) for place, occurrence in named]
        groups = [
            SampledGroup(place, group.trajectories, group.scores)
            for place, group in enumerate(taken)
            if group.scores is not None
        ]
        with self.recorder.phase("score"):
            return SampledBatch(prompts, scored_rollouts(groups, self.add_model))

    def drain(self, version: int) -> None:
        """Wait until no request is in flight, before the trainer's weights of ``version`` are published. Collective."""
        self._wait(version, lambda ahead: not ahead.num_in_flight)

    def _wait(self, version: int, is_done: Callable[[SamplingAhead], bool]) -> None:
        """Wait until ``is_done`` returns true on the first rank. ``version``: version of the trainer's weights."""

        def finish(first: FirstRank, seconds: float) -> bool:
            self.recorder.progress(first.ahead.progress())
            if not is_done(first.ahead):
                first.ahead.wait(seconds)
            return is_done(first.ahead)

        wait_together(self.first, finish, lambda: self.resync(version), self.recorder.beat)


@dataclass(frozen=True, slots=True)
class FleetSampler:
    """Samples responses for evaluation with disaggregated engines: a :class:`rlhf_mcore.protocols.ResponseSampler`.

    ``resync`` sends the last published weights to the engines again. ``beat`` reports progress to the watchdog. ``single_turn``:
    sample responses instead of episodes.
    """

    first: FirstRank | None
    decode: Decode
    resync: Callable[[], object]
    beat: Callable[[], object]
    single_turn: bool = False

    @property
    def rank(self) -> EngineRank:
        """Return the position of the engines. They count as one, which the first rank leads."""
        return EngineRank(is_lead=self.first is not None)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Return all responses to each prompt, in prompt order. Returns [] on other ranks than the first. Collective over the world.

        If all engines are lost during the wait, the new engines get weights.
        """
        jobs = [replace(job, is_single_turn=self.single_turn) for job in jobs_of(prompts, sampling, step)]
        first, trajectories = self.first, list["Trajectory"]()
        futures = on_every_rank(lambda: [] if first is None else first.begin(jobs))

        def finish(_: FirstRank, seconds: float) -> bool:
            if wait(futures, seconds).not_done:
                return False
            trajectories.extend(future.result() for future in futures)
            return True

        wait_together(first, finish, self.resync, self.beat)
        return trajectories

    def wait(self) -> None:
        """Do nothing, because ``sample`` is collective."""
