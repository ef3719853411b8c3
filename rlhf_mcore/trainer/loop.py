"""The training loop of reinforcement learning, fine-tuning and reward models. It calls the parts in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_mcore.trainer.divergence import DivergedError, stop_if_diverged
from rlhf_mcore.trainer.metrics import Counters

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_mcore.protocols import Evaluator, Learner, Publisher, Source
    from rlhf_mcore.trainer.checkpointer import RunCheckpointer
    from rlhf_mcore.trainer.record import RunRecord


@dataclass(slots=True)
class TrainingLoop:
    """Runs steps: the source returns rows, the learner trains on them, and the publisher sends the new weights to the engines.

    The source of reinforcement learning is :class:`rlhf_mcore.trainer.batches.ColocatedBatches`, or
    :class:`rlhf_mcore.trainer.pipeline.PipelinedBatches` with disaggregated engines.
    """

    source: Source
    learner: Learner
    publisher: Publisher
    evaluator: Evaluator
    checkpointer: RunCheckpointer
    recorder: RunRecord
    max_bad_updates: int = 5
    counters: Counters = field(default_factory=Counters)

    def run(self, num_steps: int, first_step: int = 1) -> bool:
        """Train from ``first_step`` to ``num_steps``. Collective over the world.

        Returns whether the last step was completed. A signal or a time limit may end the run earlier, after a save.
        """
        self.begin(num_steps, first_step)
        for step in range(first_step, num_steps + 1):
            if self.step(step, num_steps):
                return False
        self.end(num_steps)
        return True

    def begin(self, num_steps: int, first_step: int = 1) -> None:
        """Publish the first weights and evaluate them before the first step. Collective over the world."""
        self.publisher.publish(first_step - 1)
        if first_step == 1 and (metrics := self._evaluate(0, num_steps)):
            self.recorder.step(0, metrics)
        self.checkpointer.begin()

    def step(self, step: int, num_steps: int) -> bool:
        """Run one step; evaluate and save if due. Collective over the world.

        Returns whether the run must end now, because of a signal or a time limit. In this case the run is already saved.
        """
        self.recorder.begin_step(step)
        metrics, evaluation = self._step(step), self._evaluate(step, num_steps)
        self.recorder.step(step, metrics | evaluation)
        return self.checkpointer.after_step(step, evaluation)

    def end(self, num_steps: int) -> None:
        """Finish saving after the last step. If the best model was loaded, publish and evaluate it. Collective over the world."""
        if (best := self.checkpointer.end()) is not None:
            self.publisher.withdraw()
            self.publisher.publish(num_steps + 1)
            self.recorder.final(num_steps, best, self._evaluate(num_steps, num_steps))

    def save_checkpoint(self, directory: Path) -> Path:
        """Save ``<directory>/checkpoint-<step>`` between two steps, and return its path. Collective over the world."""
        return self.checkpointer.save_to(directory, self.counters.steps)

    def _step(self, step: int) -> dict[str, float]:
        batch, metrics = self.source.next_batch(step)
        self.publisher.withdraw()
        results, learned = self.learner.learn(step, batch)
        metrics = {
            **metrics,
            **learned,
            **{name: value for result in results for name, value in result.metrics.items()},
        }
        try:
            stop_if_diverged(results, self.max_bad_updates)
        except DivergedError:
            self.recorder.step(step, metrics)  # the metrics of the last step may show the cause
            raise
        return {**metrics, **self.counters.count(batch), **self.publisher.publish(step)}

    def _evaluate(self, step: int, num_steps: int) -> dict[str, float]:
        if not self.evaluator.is_due(step, num_steps):
            return {}
        with self.recorder.phase("evaluate"):
            return self.evaluator.run(step)
