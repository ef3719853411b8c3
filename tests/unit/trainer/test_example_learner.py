"""The loop with fakes, and held-out figures by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.trainer.divergence import DivergedError
from rlhf_mcore.trainer.example_learner import (
    ExampleEvaluator,
    ExampleLearner,
    NoPublisher,
    likelihood,
    likelihood_metrics,
    preference,
    preference_metrics,
)
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.metrics import Counters
from rlhf_mcore.types import TrainBatch, UpdateResult
from tests.episodes import make_example
from tests.rows import padded_batch

pytestmark = pytest.mark.usefixtures("world")

EXAMPLES = [
    make_example([1], [2, 3]),
    make_example([1, 4], [5]),
    make_example([6], [7, 8, 9]),
]
PAIRS = [make_example([1], [score], [other]) for score, other in ((3, 1), (2, 2), (1, 3), (5, 4))]


class Everything:
    """Source, model, checkpointer and recorder, which write down what is asked of them."""

    def __init__(self, bad_updates: int = 0, ends_after: int = 0) -> None:
        self.events: list[Any] = []
        self.bad_updates, self.ends_after = bad_updates, ends_after
        self.best: int | None = None

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        self.events.append("batch")
        return example_batch(EXAMPLES), {}

    def deliver_update(self, batch: TrainBatch) -> Callable[[], UpdateResult]:
        self.events.append(f"update of {len(batch.lengths)}")
        return lambda: UpdateResult("actor", {"loss/sft": 1.0, "actor/lr": 0.5}, bad_in_a_row=self.bad_updates)

    def begin_step(self, step: int) -> None: ...

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def rollouts(self, *_: Any) -> None:
        raise AssertionError("nothing is generated")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append((step, sorted({name.split("/")[0] for name in metrics})))

    def begin(self) -> None:
        self.events.append("begin")

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.events.append(f"save {step}")
        return step == self.ends_after

    def end(self) -> int | None:
        self.events.append("end")
        return self.best

    def final(self, last_step: int, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("final", last_step, step, dict(metrics)))

    def save_to(self, directory: Path, step: int) -> Path:
        raise AssertionError("nobody asks for it")


def held_out(every: int, examples: list[TokenizedExample] = EXAMPLES) -> ExampleEvaluator:
    return ExampleEvaluator(examples, every, 2, lambda batch: {"rows": float(len(batch.lengths))}, dict)


def trainer(all_parts: Everything, which: ExampleEvaluator) -> TrainingLoop:
    learner = ExampleLearner(all_parts, all_parts)
    return TrainingLoop(all_parts, learner, NoPublisher(), which, all_parts, all_parts, max_bad_updates=2)


def test_the_order_of_a_run() -> None:
    all_parts = Everything()
    which = trainer(all_parts, held_out(2))
    assert which.run(3) is True
    step = ["batch", "update of 3"]
    alone = ["actor", "loss", "progress"]
    both = ["actor", "evaluate", "loss", "progress"]
    assert all_parts.events == [
        (0, ["evaluate"]),
        "begin",
        *step,
        (1, alone),
        "save 1",
        *step,
        (2, both),
        "save 2",
        *step,
        (3, both),
        "save 3",
        "end",
    ]
    assert which.counters == Counters(steps=3, prompts=9, samples=9, tokens=18)


def test_a_reference_computes_before_the_update() -> None:
    all_parts = Everything()
    learner = ExampleLearner(all_parts, all_parts, compute_reference=lambda batch: all_parts.events.append("reference"))
    learner.learn(1, example_batch(EXAMPLES))
    assert all_parts.events == ["reference", "update of 3"]


def test_a_run_goes_on_without_the_first_evaluation_and_ends_when_it_is_told() -> None:
    all_parts = Everything(ends_after=3)
    assert trainer(all_parts, held_out(0)).run(4, first_step=2) is False
    assert [event for event in all_parts.events if isinstance(event, str)][-1] == "save 3"
    assert [event[0] for event in all_parts.events if isinstance(event, tuple)] == [2, 3]


def test_a_run_that_ends_with_its_best_model_evaluates_that_one() -> None:
    all_parts = Everything()
    all_parts.best = 1
    assert trainer(all_parts, held_out(0)).run(2) is True
    assert all_parts.events[-2:] == ["end", ("final", 2, 1, {"evaluate/rows": 3.0})]


def test_a_run_that_diverges_ends() -> None:
    all_parts = Everything(bad_updates=2)
    with pytest.raises(DivergedError, match=r"actor .* in 2 updates in a row"):
        trainer(all_parts, held_out(0)).run(4)
    assert "save 1" not in all_parts.events


def test_without_held_out_examples_nothing_is_evaluated() -> None:
    all_parts = Everything()
    trainer(all_parts, held_out(1, [])).run(1)
    assert [event for event in all_parts.events if isinstance(event, tuple)] == [(1, ["actor", "loss", "progress"])]


def test_every_example_is_measured_once() -> None:
    assert held_out(1).run(0) == {"evaluate/rows": 3.0}


class Says:
    """Log-probability -log(token) of every token, and the last token as the score."""

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return torch.where(batch.loss_mask, -batch.token_ids.float().log(), torch.nan)

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        return padded_batch(batch).token_ids.long().gather(1, batch.lengths[:, None] - 1)[:, 0].float()


def test_likelihood_is_a_mean_over_tokens_of_all_batches() -> None:
    found = ExampleEvaluator(EXAMPLES, 1, 2, lambda batch: likelihood(Says(), batch), likelihood_metrics).run(0)
    product = 2 * 3 * 5 * 7 * 8 * 9  # six tokens
    assert found["evaluate/loss"] == pytest.approx(math.log(product) / 6)
    assert found["evaluate/perplexity"] == pytest.approx(product ** (1 / 6))


def test_preferences_are_means_over_pairs() -> None:
    found = ExampleEvaluator(
        PAIRS, 1, 3, lambda batch: preference(Says().compute_scores, batch), preference_metrics
    ).run(0)
    assert found["evaluate/accuracy"] == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    assert found["evaluate/margin"] == pytest.approx((2 + 0 - 2 + 1) / 4)
    losses = [math.log(1 + math.exp(-margin)) for margin in (2, 0, -2, 1)]
    assert found["evaluate/loss"] == pytest.approx(sum(losses) / 4)
