"""Training on given responses: the loop, and the evaluation on held-out ones. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.algorithms.supervised import perplexity
from rlhf_mcore.data.examples import Example, example_batch
from rlhf_mcore.parallel.collectives import union
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.trainer.metrics import stop_if_diverged

if TYPE_CHECKING:
    from rlhf_mcore.trainer.counters import Counters
    from rlhf_mcore.trainer.parts import Checkpointer, LogprobModel, Recorder, ScoreModel, TrainableModel
    from rlhf_mcore.types import TrainBatch

Sums = dict[str, float]


class BatchSource(Protocol):
    """The rows of one step after the other."""

    def next_batch(self) -> TrainBatch: ...


@dataclass(slots=True)
class SupervisedTrainer:
    """One update per step."""

    source: BatchSource
    model: TrainableModel
    held_out: HeldOut
    checkpointer: Checkpointer
    recorder: Recorder
    counters: Counters
    max_bad_updates: int

    def run(self, num_steps: int, first_step: int = 1) -> bool:
        """Train from ``first_step`` to ``num_steps``. Collective over the world.

        Returns whether the last step was made: a signal or a time limit may end a run before, after a save.
        """
        if first_step == 1 and (metrics := self._evaluate(0, num_steps)):
            self.recorder.step(0, metrics)
        self.checkpointer.begin()
        for step in range(first_step, num_steps + 1):
            metrics = self._step()
            metrics |= self._evaluate(step, num_steps)
            self.recorder.step(step, metrics)
            if self.checkpointer.after_step(step, metrics):
                return False
        if (best := self.checkpointer.end()) is not None:
            self.recorder.final(num_steps, best, self._evaluate(num_steps, num_steps))
        return True

    def _step(self) -> dict[str, float]:
        batch = self.source.next_batch()
        with self.recorder.phase("update"):
            metrics = union(self.model.deliver_update(batch)())
        stop_if_diverged(metrics, self.max_bad_updates)
        return metrics | self.counters.count(batch)

    def _evaluate(self, step: int, num_steps: int) -> dict[str, float]:
        if not self.held_out.is_due(step, num_steps):
            return {}
        with self.recorder.phase("evaluate"):
            return self.held_out.run()


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Means over all held-out examples: ``measure`` sums over some of them, ``named`` makes metrics of the sums of all."""

    examples: Sequence[Example]
    every: int
    examples_per_batch: int
    measure: Callable[[TrainBatch], Sums]
    named: Callable[[Sums], dict[str, float]]

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after ``step`` steps: always before the first and after the last."""
        if not self.examples:
            return False
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)

    def run(self) -> dict[str, float]:
        """Collective over the world; all ranks have the same result."""
        totals: Sums = {}
        for batch in self._batches():
            for name, value in self.measure(batch).items():
                totals[name] = totals.get(name, 0.0) + value
        return {f"evaluate/{name}": value for name, value in self.named(totals).items()}

    def _batches(self) -> Iterator[TrainBatch]:
        for start in range(0, len(self.examples), self.examples_per_batch):
            yield example_batch(self.examples[start : start + self.examples_per_batch])


def likelihood(model: LogprobModel, batch: TrainBatch) -> Sums:
    """Negative log-likelihood and number of the response tokens. Collective over the world."""
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    nll = rows.sums(-model.compute_logprobs(batch), batch.loss_mask)
    return {"nll": float(nll.sum()), "num_tokens": float(batch.num_sampled.sum())}


def likelihood_metrics(sums: Sums) -> dict[str, float]:
    """Mean per token, over the tokens of all examples."""
    nll = sums["nll"] / sums["num_tokens"]
    return {"loss": nll, "perplexity": perplexity(nll)}


def preference(model: ScoreModel, batch: TrainBatch) -> Sums:
    """Of pairs whose rows follow each other, the chosen one first. A tie is half right. Collective over the world."""
    chosen, rejected = model.compute_scores(batch).double().view(-1, 2).unbind(1)
    margins = chosen - rejected
    return {
        "pairs": float(len(margins)),
        "accuracy": float((margins > 0).sum() + 0.5 * (margins == 0).sum()),
        "margin": float(margins.sum()),
        "loss": float(-logsigmoid(margins).sum()),
    }


def preference_metrics(sums: Sums) -> dict[str, float]:
    """Means over pairs."""
    return {name: sums[name] / sums["pairs"] for name in ("loss", "accuracy", "margin")}
