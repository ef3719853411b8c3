"""The whole loop with fakes that write down what happened, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig
from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.parts import PromptBatches
from rlhf_mcore.types import Prompt, Sampling, Score, TrainBatch, Trajectory
from tests.unit.trainer.records import prompt, trajectory

pytestmark = pytest.mark.usefixtures("world")

Log = list[tuple[Any, ...]]


class Engine:
    is_lead, num_engines, engine_index = True, 1, 0

    def __init__(self, log: Log) -> None:
        self.log, self.policy_version, self.awake = log, -1, False

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        assert self.awake
        self.log.append(("generate", step, [p.index for p in prompts], self.policy_version))
        made = [trajectory(p, k) for p in prompts for k in range(sampling.n)]
        return [replace(t, policy_version=self.policy_version) for t in made]

    def sleep(self) -> None:
        self.log.append(("sleep",))
        self.awake = False

    def wake(self) -> None:
        self.log.append(("wake",))
        self.awake = True


class Bridge:
    def __init__(self, log: Log, engine: Engine) -> None:
        self.log, self.engine = log, engine

    def sync(self, version: int) -> SyncStats:
        assert self.engine.awake
        self.log.append(("sync", version))
        self.engine.policy_version = version
        return SyncStats(0.0, received_bytes=3, local_bytes=4, peak_bytes=5)


class Reward:
    def __init__(self, log: Log) -> None:
        self.log = log

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.log.append(("score", len(trajectories)))
        return [Score(float(t.sample)) for t in trajectories]


class Model:
    """Actor or reference: says a constant logprob, and keeps the batch of its update."""

    def __init__(self, log: Log, name: str, logprob: float) -> None:
        self.log, self.name, self.logprob = log, name, logprob
        self.batch: TrainBatch | None = None

    def compute_logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        self.log.append((self.name,))
        shape = batch.token_ids.shape
        return torch.full(shape, self.logprob), torch.zeros(shape)

    def update(self, batch: TrainBatch) -> Mapping[str, float]:
        self.log.append(("update",))
        self.batch = batch
        return {"loss/total": 0.5}


class Evaluator:
    def __init__(self, log: Log, due: set[int]) -> None:
        self.log, self.due = log, due

    def is_due(self, step: int, num_steps: int) -> bool:
        return step in self.due

    def run(self, step: int) -> dict[str, float]:
        self.log.append(("evaluate", step))
        return {"evaluate/reward": float(step)}


class Watch:
    """Recorder and checkpointer."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.metrics: dict[int, Mapping[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.log.append(("phase", name))
        yield

    def rollouts(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        self.log.append(("rollouts", step, len(trajectories), len(scores)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.append(("record", step))
        self.metrics[step] = metrics

    def after_step(self, step: int) -> None:
        self.log.append(("checkpoint", step))


class Sampler:
    def __init__(self) -> None:
        self.batches = iter([[3, 1], [0, 2]])

    def next_batch(self) -> list[int]:
        return next(self.batches)


def trainer(due: set[int], *, with_reference: bool) -> tuple[Trainer, Log]:
    log: Log = []
    engine, watch = Engine(log), Watch(log)
    group = dist.group.WORLD
    assert group is not None
    made = Trainer(
        prompt_source=PromptBatches([prompt(i) for i in range(4)], Sampler()),
        engine=engine,  # type: ignore[arg-type]
        sampling=Sampling(n=2),
        reward=Reward(log),
        exchange=Exchange(0, 1, samples_per_prompt=2, prompts_per_minibatch=1, pad_token_id=0),
        actor=Model(log, "actor", -2.0),
        reference=Model(log, "reference", -3.0) if with_reference else None,
        algorithm=AlgorithmConfig(kl=KLConfig(coef=0.1 if with_reference else 0.0)),
        dp_group=group,
        bridge=Bridge(log, engine),
        evaluator=Evaluator(log, due),  # type: ignore[arg-type]
        checkpointer=watch,
        recorder=watch,
    )
    return made, log


def step_of(number: int, prompts: list[int], reference: list[tuple[Any, ...]]) -> Log:
    return [
        ("phase", "generate"),
        ("generate", number, prompts, number - 1),  # by the policy that this step updates
        ("sleep",),
        ("phase", "score"),
        ("score", 4),
        ("rollouts", number, 4, 4),
        ("phase", "exchange"),
        *reference,
        ("phase", "old_logprobs"),
        ("actor",),
        ("phase", "update"),
        ("update",),
        ("phase", "sync"),
        ("wake",),
        ("sync", number),
    ]


@pytest.mark.parametrize("with_reference", [False, True])
def test_two_steps_in_order(with_reference: bool) -> None:
    which, log = trainer({0, 2}, with_reference=with_reference)
    which.run(2)
    reference: Log = [("phase", "reference"), ("reference",)] if with_reference else []
    assert log == [
        ("phase", "sync"),
        ("wake",),
        ("sync", 0),
        ("phase", "evaluate"),
        ("evaluate", 0),
        ("record", 0),
        *step_of(1, [3, 1], reference),
        ("record", 1),
        ("checkpoint", 1),
        *step_of(2, [0, 2], reference),
        ("phase", "evaluate"),
        ("evaluate", 2),
        ("record", 2),
        ("checkpoint", 2),
    ]


def test_nothing_is_recorded_before_training_without_an_evaluation() -> None:
    which, log = trainer(set(), with_reference=False)
    which.run(1)
    assert log[:4] == [("phase", "sync"), ("wake",), ("sync", 0), ("phase", "generate")]


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_update_gets_a_complete_batch(with_reference: bool) -> None:
    which, _ = trainer({1}, with_reference=with_reference)
    which.run(1)
    batch = which.actor.batch  # type: ignore[attr-defined]
    assert batch.row_ids.tolist() == [0, 1, 2, 3] and batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.minibatch_ids.tolist() == [0, 0, 1, 1] and batch.num_minibatches == 2
    assert batch.token_ids[0].tolist() == [103, 103, 4000, 4001, 4002]  # prompt 3 came first
    assert torch.equal(batch.old_logprobs, torch.full((4, 5), -2.0))
    if with_reference:
        assert torch.equal(batch.ref_logprobs, torch.full((4, 5), -3.0))
    else:
        assert batch.ref_logprobs is None
    # Scores 0 and 1 in each group: -+ sqrt(1/2) on the response tokens.
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]).mul(0.5**0.5)[:, None] * batch.loss_mask
    torch.testing.assert_close(batch.advantages, expected, rtol=0, atol=3e-6)


def test_metrics_of_all_parts_arrive_in_one_record() -> None:
    which, _ = trainer({1}, with_reference=True)
    which.run(1)
    metrics = which.recorder.metrics[1]  # type: ignore[attr-defined]
    assert metrics["reward/mean"] == 0.5 and metrics["rollout/num_tokens"] == 12.0
    assert metrics["loss/total"] == 0.5 and metrics["evaluate/reward"] == 1.0
    # The engine said -4.0, -4.001, ... and -2.2 at most; the trainer says -2 of every token.
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(2.102, abs=1e-5)


def test_an_error_in_a_part_ends_the_run() -> None:
    which, log = trainer(set(), with_reference=False)

    def broken(trajectories: Sequence[Trajectory]) -> list[Score]:
        raise ValueError("the grader fails")

    which.reward.score = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the grader fails"):
        which.run(2)
    assert ("update",) not in log and ("record", 1) not in log
