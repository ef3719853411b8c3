"""Pipelined training: engines of their own sample for coming steps while the trainer learns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.trainer.ahead import SamplingAhead
from rlhf_mcore.trainer.dynamic_sampling import Collected
from rlhf_mcore.trainer.reinforcement import AddScores, keep_scores, scored_batch
from rlhf_mcore.trainer.rollouts import Rollouts

if TYPE_CHECKING:
    from rlhf_mcore.protocols import WeightBridge
    from rlhf_mcore.trainer.canary import Canary
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.trainer.parts import Recorder
    from rlhf_mcore.types import Completion, Prompt, Request, TrainBatch

# Other ranks than the first wait in collectives that are at most so far apart, however long responses take.
TURN_S = 10.0


@dataclass(frozen=True, slots=True)
class FirstRank:
    """What only the first rank has: it alone talks to the engines."""

    ahead: SamplingAhead
    needs_weights: Callable[[], bool] = lambda: False  # whether engines wait for weights, and none has any


@dataclass(frozen=True, slots=True)
class PipelinedBatches:
    """Batches whose responses were sampled while earlier ones were learned from, by a policy that is at most so much older.

    ``prompts`` are those of the data, on every rank. ``resync`` brings the weights of a version to the engines again.
    """

    prompts: Sequence[Prompt]
    first: FirstRank | None
    exchange: RowExchange
    recorder: Recorder
    resync: Callable[[int], object]
    add_model: AddScores = keep_scores

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """The scored rows of a step, and metrics of them. Collective over the world."""
        first = self.first
        with self.recorder.phase("generate"):
            if first is not None:
                first.ahead.fill(step)
            self._wait(step - 1, SamplingAhead.is_ready)
        taken = first.ahead.take() if first is not None else []
        named = broadcast_json([(group.place, group.prompt.occurrence) for group in taken], 0)
        trajectories = [trajectory for group in taken for trajectory in group.trajectories]
        positions = [position for position, group in enumerate(taken) for _ in group.trajectories]
        with self.recorder.phase("score"):
            scores = [score for group in taken if group.scores is not None for score in group.scores()]
            scores = self.add_model(trajectories, scores)
        prompts = [replace(self.prompts[place], occurrence=occurrence) for place, occurrence in named]
        collected = Collected(prompts, Rollouts(positions, trajectories), scores)
        batch, metrics = scored_batch(step, collected, self.exchange, self.recorder)
        counted = (first.ahead.num_in_flight, first.ahead.redrawn) if first is not None else None
        in_flight, redrawn = broadcast_json(counted, 0)
        return batch, {**metrics, "rollout/in_flight": float(in_flight), "rollout/redrawn": float(redrawn)}

    def drain(self, version: int) -> None:
        """Wait until nothing is being sampled, before the trainer's weights, of ``version``, are published. Collective."""
        self._wait(version, lambda ahead: not ahead.num_in_flight)

    def _wait(self, version: int, is_done: Callable[[SamplingAhead], bool]) -> None:
        """Until the first rank finds ``is_done``. Engines that have replaced all others get the weights that the trainer has."""

        def turn() -> str:
            if self.first is None:
                return ""
            ahead, needs_weights = self.first.ahead, self.first.needs_weights
            ahead.wait(lambda: is_done(ahead) or needs_weights(), TURN_S)
            return "done" if is_done(ahead) else "publish" if needs_weights() else ""

        while (found := broadcast_json(on_every_rank(turn), 0)) != "done":
            if found == "publish":
                self.resync(version)


class NoGenerator:
    """Of a rank that does not talk to the engines."""

    num_in_flight = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return []

    def submit(self, requests: Sequence[Request]) -> None: ...

    def collect(self, timeout_s: float) -> list[Completion]:
        return []

    def cancel(self, request_ids: Collection[int]) -> None: ...


@dataclass(slots=True)
class RemotePublisher:
    """Brings the actor's weights to engines of their own, which continue to sample when they have them."""

    bridge: WeightBridge
    recorder: Recorder
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
        return {"bridge/sent_bytes": float(stats.sent_bytes)}

    def withdraw(self) -> None:
        """Engines sample on."""
