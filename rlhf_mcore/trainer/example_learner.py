"""Training on given responses, and evaluation on held-out responses. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.masking import OwnedRows
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
    """Updates a policy or a reward model once per step.

    ``compute_reference`` adds the logprobs of a frozen policy to a batch, for updates that use them.
    """

    model: TrainableModel
    recorder: RunRecord
    work: StepWork | None = None
    compute_reference: Callable[[TrainBatch], None] | None = None

    def learn(self, step: int, batch: TrainBatch) -> tuple[list[UpdateResult], Mapping[str, float]]:
        """Update the model with the rows of a step. Collective over the world."""
        if self.work is not None:
            self.work.count(batch)
        if self.compute_reference is not None:
            with self.recorder.phase("reference"):
                self.compute_reference(batch)
        with self.recorder.phase("update"):
            return share_results([self.model.deliver_update(batch)()]), {}


class NoPublisher:
    """A publisher for runs without engines: checkpoints are the only users of the weights."""

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def withdraw(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExampleEvaluator:
    """Computes means over all held-out examples. ``measure`` sums over a batch; ``named`` converts the totals to metrics."""

    examples: Sequence[TokenizedExample]
    every: int
    examples_per_batch: int
    measure: Callable[[TrainBatch], Sums]
    named: Callable[[Sums], dict[str, float]]
    build: Callable[[Sequence[TokenizedExample]], TrainBatch] = example_batch

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after ``step`` steps. Always true before the first step and after the last step."""
        if not self.examples:
            return False
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Return the metrics, equal on all ranks. They depend on the weights but not on ``step``. Collective over the world."""
        totals: Sums = {}
        for start in range(0, len(self.examples), self.examples_per_batch):
            batch = self.build(self.examples[start : start + self.examples_per_batch])
            for name, value in self.measure(batch).items():
                totals[name] = totals.get(name, 0.0) + value
        return {f"evaluate/{name}": value for name, value in self.named(totals).items()}


def likelihood(model: LogprobModel, batch: TrainBatch) -> Sums:
    """Return the negative log-likelihood and the number of the response tokens. Collective over the world."""
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    nll = rows.sums(-model.compute_logprobs(batch), batch.loss_mask)
    return {"nll": float(nll.sum()), "num_tokens": float(batch.num_sampled.sum())}


def likelihood_metrics(sums: Sums) -> dict[str, float]:
    """Return the mean loss per token over all examples, and its perplexity."""
    nll = sums["nll"] / sums["num_tokens"]
    return {"loss": nll, "perplexity": perplexity(nll)}


def preference(compute_scores: Callable[[TrainBatch], Tensor], batch: TrainBatch) -> Sums:
    """Sum accuracy, margin and loss over pairs. A tie counts as half correct. Collective.

    The rows of a pair are adjacent, with the chosen response first.
    """
    chosen, rejected = compute_scores(batch).double().view(-1, 2).unbind(1)
    margins = chosen - rejected
    return {
        "pairs": float(len(margins)),
        "accuracy": float((margins > 0).sum() + 0.5 * (margins == 0).sum()),
        "margin": float(margins.sum()),
        "loss": float(-logsigmoid(margins).sum()),
    }


def preference_metrics(sums: Sums) -> dict[str, float]:
    """Return the means over all pairs."""
    return {name: value / sums["pairs"] for name, value in sums.items() if name != "pairs"}


def add_reference(
    examples: Sequence[TokenizedExample],
    reference: LogprobModel,
    examples_per_batch: int,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Set the reference's logprob of each response of the examples. Collective over the world.

    Batches follow the order of ``examples``, so a resumed run computes bitwise the same values.
    """
    for start in range(0, len(examples), examples_per_batch):
        progress(f"reference, {start:,} of {len(examples):,} examples")
        part = examples[start : start + examples_per_batch]
        batch = example_batch(part)
        rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
        sums = iter(rows.sums(reference.compute_logprobs(batch), batch.loss_mask).tolist())
        for example in part:
            example.reference_logprobs = [next(sums) for _ in example.response_ids]
