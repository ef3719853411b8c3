"""Pipelined training: engines of their own sample for coming steps while the trainer learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.trainer.reinforcement import AddScores, keep_scores, scored_batch
from rlhf_mcore.trainer.sampled import FillStep, Rollout, SampledBatch, take_next_batch
from rlhf_mcore.types import EngineWork

if TYPE_CHECKING:
    from rlhf_mcore.protocols import WeightBridge
    from rlhf_mcore.trainer.ahead import SamplingAhead
    from rlhf_mcore.trainer.canary import Canary
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.trainer.record import RunRecord
    from rlhf_mcore.types import Completion, Prompt, Request, TrainBatch

# Other ranks than the first wait in collectives that are at most so far apart, however long responses take.
TURN_S = 10.0
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


# Waits so many seconds for what was asked for; None: it is not there yet, or weights have to come first.
Wait = Callable[[float], "list[Completion] | None"]


@dataclass(frozen=True, slots=True)
class FirstRank:
    """Hold what only the first rank has: it alone talks to the engines."""

    ahead: SamplingAhead
    needs_weights: Callable[[], bool]  # whether engines wait for weights, and none has any
    begin: Callable[[Sequence[Request]], Wait]  # to generate
    # What all engines have done since the last call, and responses by another version than they were submitted for.
    pop_work: Callable[[], tuple[EngineWork, int]]
    tokens_drawn: Callable[[], int]  # by all engines; it changes while they make progress


def together(
    first: FirstRank | None, turn: Callable[[FirstRank], str], resync: Callable[[], object], beat: Callable[[], object]
) -> None:
    """Repeat ``turn`` on the first rank until it is "done". Engines that have replaced all others get weights where it is "publish".

    Every rank calls ``beat`` after a turn in which engines have drawn tokens. Collective over the world.
    """
    answer, drawn = "", -1
    while answer != "done":
        answers = on_every_rank(lambda: None if first is None else (turn(first), first.tokens_drawn()))
        answer, now = broadcast_json(answers, 0)
        if now != drawn:
            drawn = now
            beat()
        if answer == "publish":
            resync()


@dataclass(frozen=True, slots=True)
class PipelinedBatches:
    """Batches whose responses were sampled while earlier ones were learned from, by a policy that is at most so much older.

    ``prompts`` are those of the data, on every rank. ``resync`` brings weights to engines that have replaced all others: those that
    were published last, if these are kept, else the trainer's, whose version it is told.
    """

    prompts: Sequence[Prompt]
    first: FirstRank | None
    exchange: RowExchange
    recorder: RunRecord
    resync: Callable[[int], object]
    add_model: AddScores = keep_scores
    fill_step: FillStep = take_next_batch

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the scored rows of a step, and metrics of them. Collective over the world."""
        sampled = self.fill_step(lambda missing, _number: self._sample(step, missing))
        batch, metrics = scored_batch(step, sampled, self.exchange, self.recorder)
        counted: list[float] = []
        if (first := self.first) is not None:
            work, other = first.pop_work()
            counted = [first.ahead.num_in_flight, first.ahead.redrawn, other, *astuple(work)]
        counts = map(float, broadcast_json(counted, 0))
        return batch, {**metrics, **dict(zip(_COUNTED, counts, strict=True))}

    def _sample(self, step: int, missing: int) -> SampledBatch:
        """Take further prompts that were sampled ahead, and wait for their scores."""
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
        placed = [(place, trajectory) for place, group in enumerate(taken) for trajectory in group.trajectories]
        with self.recorder.phase("score"):
            scores = [score for group in taken if group.scores is not None for score in group.scores.result()]
            scores = self.add_model([trajectory for _, trajectory in placed], scores)
        rollouts = [Rollout(*each, score) for each, score in zip(placed, scores, strict=True)]
        return SampledBatch(prompts, rollouts)

    def drain(self, version: int) -> None:
        """Wait until nothing is being sampled, before the trainer's weights, of ``version``, are published. Collective."""
        self._wait(version, lambda ahead: not ahead.num_in_flight)

    def _wait(self, version: int, is_done: Callable[[SamplingAhead], bool]) -> None:
        """Wait until ``is_done`` holds on the first rank. ``version`` is that of the weights that the trainer has."""

        def turn(first: FirstRank) -> str:
            ahead, needs_weights = first.ahead, first.needs_weights

            def goes_on() -> bool:  # asked for whenever responses have come
                self.recorder.progress(ahead.progress())
                return is_done(ahead) or needs_weights()

            ahead.wait(goes_on, TURN_S)
            return "done" if is_done(ahead) else "publish" if needs_weights() else ""

        together(self.first, turn, lambda: self.resync(version), self.recorder.beat)


@dataclass(slots=True)
class SharedEngines:
    """The engines as all ranks use them together, to evaluate. One batch of requests is in flight at a time.

    ``resync`` brings the weights that were published last to the engines again.
    """

    first: FirstRank | None
    resync: Callable[[], object]
    beat: Callable[[], object]  # notes progress, for the watchdog
    num_in_flight: int = field(default=0, init=False)
    _wait: Wait | None = field(default=None, init=False)  # on the first rank, for the completions

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to sample. Collective over the world."""
        first = self.first
        assert not self.num_in_flight, "one batch at a time"
        self._wait = on_every_rank(lambda: None if first is None else first.begin(requests))
        self.num_in_flight = len(requests)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return the completions of all requests on the first rank, and [] on others. Collective over the world.

        If all engines are lost meanwhile, those that replace them get weights.
        """
        wait, completions = self._wait, list["Completion"]()

        def turn(first: FirstRank) -> str:
            assert wait is not None
            found = wait(TURN_S)
            if found is None:
                return "publish" if first.needs_weights() else ""
            completions.extend(found)
            return "done"

        together(self.first, turn, self.resync, self.beat)
        self.num_in_flight = 0
        return completions

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Submit and collect."""
        self.submit(requests)
        return self.collect(math.inf)

    def cancel(self, request_ids: Collection[int]) -> None:
        """Do nothing: what is in flight is collected."""


@dataclass(slots=True)
class RemotePublisher:
    """Brings the actor's weights to engines of their own, which continue to sample when they have them."""

    bridge: WeightBridge
    recorder: RunRecord
    drain: Callable[[int], None] | None = None  # before the weights of a step come
    canary: Canary | None = None

    def publish(self, version: int) -> Mapping[str, float]:
        """Replace the weights of all engines between two of their steps. Collective."""
        if self.drain is not None:
            with self.recorder.phase("drain"):
                self.drain(version)
        with self.recorder.phase("sync"):
            stats = self.bridge.sync(version)
            if self.canary is not None:
                self.canary.check(version)
        share = {"bridge/sent_share": stats.sent_bytes / stats.whole_bytes} if stats.whole_bytes else {}
        return {"bridge/sent_bytes": float(stats.sent_bytes), **share}

    def withdraw(self) -> None:
        """Do nothing: engines sample on."""
