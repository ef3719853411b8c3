"""Training on given responses as a learner of the loop, and the evaluation on held-out ones. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.algorithms.supervised import perplexity
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.trainer.divergence import share_results

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.protocols import LogprobModel, TrainableModel
    from rlhf_mcore.trainer.record import RunRecord
    from rlhf_mcore.trainer.work import StepWork
    from rlhf_mcore.types import TrainBatch, UpdateResult

Sums = dict[str, float]


@dataclass(frozen=True, slots=True)
class ExampleLearner:
    """One update per step, of a policy or of a reward model.

    ``compute_reference`` adds logprobs of a frozen policy to a batch, where the update reads them.
    """

    model: TrainableModel
    recorder: RunRecord
    work: StepWork | None = None
    compute_reference: Callable[[TrainBatch], None] | None = None

    def learn(self, step: int, batch: TrainBatch) -> tuple[list[UpdateResult], Mapping[str, float]]:
        """Update the model by the rows of a step. Collective over the world."""
        if self.work is not None:
            self.work.count(batch)
        if self.compute_reference is not None:
            with self.recorder.phase("reference"):
                self.compute_reference(batch)
        with self.recorder.phase("update"):
            return share_results([self.model.deliver_update(batch)()]), {}


class NoPublisher:
    """The weights go to checkpoints only."""

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def withdraw(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExampleEvaluator:
    """Means over all held-out examples: ``measure`` sums over some of them, ``named`` makes metrics of the sums of all."""

    examples: Sequence[TokenizedExample]
    every: int
    examples_per_batch: int
    measure: Callable[[TrainBatch], Sums]
    named: Callable[[Sums], dict[str, float]]
    build: Callable[[Sequence[TokenizedExample]], TrainBatch] = example_batch

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after ``step`` steps: always before the first and after the last."""
        if not self.examples:
            return False
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Evaluate: the same at every ``step`` for the same weights. Collective over the world; all ranks have the same result."""
        totals: Sums = {}
        for start in range(0, len(self.examples), self.examples_per_batch):
            batch = self.build(self.examples[start : start + self.examples_per_batch])
            for name, value in self.measure(batch).items():
                totals[name] = totals.get(name, 0.0) + value
        return {f"evaluate/{name}": value for name, value in self.named(totals).items()}


def likelihood(model: LogprobModel, batch: TrainBatch) -> Sums:
    """Negative log-likelihood and number of the response tokens. Collective over the world."""
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    nll = rows.sums(-model.compute_logprobs(batch), batch.loss_mask)
    return {"nll": float(nll.sum()), "num_tokens": float(batch.num_sampled.sum())}


def likelihood_metrics(sums: Sums) -> dict[str, float]:
    """Mean per token, over the tokens of all examples."""
    nll = sums["nll"] / sums["num_tokens"]
    return {"loss": nll, "perplexity": perplexity(nll)}


def preference(compute_scores: Callable[[TrainBatch], Tensor], batch: TrainBatch) -> Sums:
    """Count pairs ordered rightly. Their rows follow each other, the chosen one first. A tie is half right. Collective."""
    chosen, rejected = compute_scores(batch).double().view(-1, 2).unbind(1)
    margins = chosen - rejected
    return {
        "pairs": float(len(margins)),
        "accuracy": float((margins > 0).sum() + 0.5 * (margins == 0).sum()),
        "margin": float(margins.sum()),
        "loss": float(-logsigmoid(margins).sum()),
    }


def preference_metrics(sums: Sums) -> dict[str, float]:
    """Means over pairs."""
    return {name: value / sums["pairs"] for name, value in sums.items() if name != "pairs"}


def add_reference(
    examples: Sequence[TokenizedExample],
    reference: LogprobModel,
    examples_per_batch: int,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Set the reference's logprob of each response of the examples. Collective over the world.

    Examples are cut into batches in their own order, so that a run which resumes gets the same numbers, bit for bit.
    """
    for start in range(0, len(examples), examples_per_batch):
        progress(f"reference, {start:,} of {len(examples):,} examples")
        part = examples[start : start + examples_per_batch]
        batch = example_batch(part)
        rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
        sums = iter(rows.sums(reference.compute_logprobs(batch), batch.loss_mask).tolist())
        for example in part:
            example.reference_logprobs = [next(sums) for _ in example.response_ids]
