"""The whole loop with fakes that write down what happened, in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.data.source import PromptBatches
from rlhf_mcore.platform import Platform
from rlhf_mcore.protocols import MEMORY, SyncStats
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.sampling.engine_loop import LostTrajectory
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.batches import ColocatedBatches, Rollout, take_next_batch
from rlhf_mcore.trainer.divergence import DivergedError
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.publishers import EnginePublisher
from rlhf_mcore.trainer.reinforcement import PolicyLearner, Roles
from rlhf_mcore.types import Completion, Request, Sampling, Score, TrainBatch, Trajectory, UpdateResult
from tests.episodes import resolved_future
from tests.messages import expect_error
from tests.unit.trainer.records import Streaming, batch_sampler, completions, prompt

pytestmark = pytest.mark.usefixtures("world")

Log = list[tuple[Any, ...]]


class Generating(Streaming):
    """A Generator that writes down what it is asked for, and loses a completion."""

    def __init__(self, log: Log, lose: int) -> None:
        super().__init__()
        self.log, self.lose, self.calls = log, lose, 0

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        self.log.append(("generate", [request.prompt_ids[0] - 100 for request in requests[::2]]))
        self.calls += 1
        return completions(requests)[: -1 if self.calls == self.lose else None]


class Memory:
    """A Sleeper."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def sleep(self, level: int = 2) -> None:
        self.log.append(("sleep", level))

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        self.log.append(("wake", *tags))


class Bridge:
    def __init__(self, log: Log) -> None:
        self.log = log

    def sync(self, version: int) -> SyncStats:
        self.log.append(("sync", version))
        return SyncStats(0.0, received_bytes=3, local_bytes=4, peak_bytes=5)


class Reward:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.value: Callable[[Trajectory], float] = lambda trajectory: float(trajectory.sample)

    def begin(self, trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
        self.log.append(("score", len(trajectories)))
        return resolved_future([Score(self.value(t)) for t in trajectories])


class Model:
    """Every role in one: says a constant everywhere, and keeps a copy of the batch of its last update."""

    def __init__(self, log: Log, name: str, says: float) -> None:
        self.log, self.name, self.says = log, name, says
        self.batch: TrainBatch | None = None
        self.result: Callable[[], UpdateResult | None] = lambda: UpdateResult(name, {f"loss/{name}": 0.5})
        self.one_update = False

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        self.log.append((self.name,))
        return torch.full(batch.token_ids.shape, self.says)

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        return self.compute_logprobs(batch), torch.full(batch.lengths.shape, 10 * self.says)

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        self.log.append((self.name,))
        return batch.group_ids * self.says

    def refresh(self, actor: Model) -> None:
        self.log.append(("refresh", actor.name))
        self.says = actor.says

    def deliver_update(self, batch: TrainBatch) -> Callable[[], UpdateResult | None]:
        self.log.append(("deliver", self.name))
        self.batch = replace(batch)

        def update() -> UpdateResult | None:
            self.log.append(("update", self.name))
            return self.result()

        return update

    def makes_one_update(self, batch: TrainBatch) -> bool:
        return self.one_update

    def logprobs_of_update(self, batch: TrainBatch) -> Tensor:
        self.log.append(("logprobs of the update",))
        return torch.full(batch.token_ids.shape, self.says)


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
        self.stop_after: int | None = None
        self.best: int | None = None
        self.save: Callable[[], None] = lambda: None

    def begin_step(self, step: int) -> None: ...

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.log.append(("phase", name))
        yield

    def progress(self, text: str) -> None: ...

    def beat(self) -> None: ...

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        self.log.append(("rollouts", step, len(rollouts)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log.append(("record", step))
        self.metrics[step] = metrics

    def begin(self) -> None:
        self.log.append(("begin",))

    def after_step(self, step: int, evaluation: Mapping[str, float]) -> bool:
        self.log.append(("checkpoint", step))
        assert evaluation == {name: value for name, value in self.metrics[step].items() if name == "evaluate/reward"}
        self.save()
        return step == self.stop_after

    def save_to(self, directory: Path, step: int) -> Path:
        self.log.append(("save", step))
        return directory / f"checkpoint-{step}"

    def end(self) -> int | None:
        self.log.append(("end",))
        return self.best

    def final(self, last_step: int, step: int, metrics: Mapping[str, float]) -> None:
        self.log.append(("final", last_step, step))


class Sampler:
    def __init__(self) -> None:
        self.batches = itertools.cycle([[3, 1], [0, 2]])

    def next_batch(self) -> list[int]:
        return next(self.batches)


SAYS = {"actor": -2.0, "reference": -3.0, "critic": 0.25}


@dataclass(slots=True)
class Run:
    """A trainer, its fakes and their log."""

    trainer: TrainingLoop
    log: Log
    watch: Watch
    models: dict[str, Model]
    reward: Reward
    source: ColocatedBatches


def make(
    due: set[int], *beside_the_actor: str, sampler: PromptSampler | None = None, lose: int = 0, **settings: int
) -> Run:
    """Build a run with the given roles. ``settings`` go to ``Roles``. The call number ``lose`` lacks its last completion."""
    log: Log = []
    watch, reward = Watch(log), Reward(log)
    algorithm = AlgorithmConfig(
        advantage="gae" if "critic" in beside_the_actor else "grpo",
        kl=KLConfig(coef=0.1 if "reference" in beside_the_actor else 0.0),
    )
    models = {name: Model(log, name, SAYS[name]) for name in ("actor", *beside_the_actor)}
    prompts = PromptBatches([prompt(i) for i in range(4)], sampler or Sampler())
    by = batch_sampler(Generating(log, lose))
    roles = Roles(models["actor"], models.get("critic"), models.get("reference"), **settings)
    source = ColocatedBatches(prompts, by, Sampling(n=2), reward.begin, take_next_batch, RowExchange(2), watch)
    made = TrainingLoop(
        source=source,
        learner=PolicyLearner(roles, AdvantageComputer(algorithm), watch),
        publisher=EnginePublisher(Memory(log), Bridge(log), watch, DeviceSharing(Platform())),
        evaluator=Evaluator(log, due),
        checkpointer=watch,
        recorder=watch,
    )
    return Run(made, log, watch, models, reward, source)


def last_batch(model: Model) -> TrainBatch:
    """The batch as a fake got it in its last update."""
    assert model.batch is not None
    return model.batch


COMPUTED: dict[str, Log] = {
    "reference": [("phase", "reference"), ("reference",)],
    "critic": [("phase", "values"), ("critic",)],
}


def sync_log(version: int) -> Log:
    # The caches come when the sync needs its buffers no longer.
    return [("phase", "sync"), ("wake", "weights"), ("sync", version), ("wake", "kv_cache")]


def step_of(number: int, prompts: list[int], *beside_the_actor: str) -> Log:
    computed = [line for name, lines in COMPUTED.items() if name in beside_the_actor for line in lines]
    return [
        ("phase", "generate"),
        ("generate", prompts),
        ("score", 2),  # a prompt is scored while others are sampled
        ("score", 2),
        ("phase", "score"),
        ("rollouts", number, 4),
        ("phase", "exchange"),
        ("sleep", 2),  # the models need the device
        *computed,
        ("phase", "old_logprobs"),
        ("actor",),
        ("phase", "update"),
        # Rows reach both models before one of them learns: on ranks of their own they learn at the same time.
        *[("deliver", name) for name in ("critic", "actor") if name in (*beside_the_actor, "actor")],
        *[("update", name) for name in ("critic", "actor") if name in (*beside_the_actor, "actor")],
        *sync_log(number),
    ]


@pytest.mark.parametrize("beside", [(), ("reference",), ("critic",), ("reference", "critic")])
def test_two_steps_in_order(beside: tuple[str, ...]) -> None:
    run = make({0, 2}, *beside)
    log = run.log
    run.trainer.run(2)
    assert log == [
        *sync_log(0),
        ("phase", "evaluate"),
        ("evaluate", 0),
        ("record", 0),
        ("begin",),
        *step_of(1, [3, 1], *beside),
        ("record", 1),
        ("checkpoint", 1),
        *step_of(2, [0, 2], *beside),
        ("phase", "evaluate"),
        ("evaluate", 2),
        ("record", 2),
        ("checkpoint", 2),
        ("end",),
    ]


def test_a_step_of_one_update_has_no_pass_for_old_logprobs_and_the_same_metrics() -> None:
    plain, run = (make(set(), "reference", "critic", warmup_steps=1) for _ in range(2))
    run.models["actor"].one_update = True
    for made in (plain, run):
        made.trainer.run(2)
    # The first step, in which the actor does not learn, has the pass; the second takes them from the update, after both have learned.
    assert [line for line in plain.log if line == ("actor",)] == [("actor",)] * 2
    assert run.log.count(("actor",)) == 1 and run.log.index(("actor",)) < run.log.index(("update", "critic"))
    assert run.log[run.log.index(("logprobs of the update",)) - 1] == ("update", "actor")
    assert last_batch(run.models["actor"]).old_logprobs is None
    both = [dict(made.watch.metrics[2]) for made in (plain, run)]
    assert [metrics.pop("actor/old_logprobs_of_update") for metrics in both] == [0.0, 1.0]
    assert both[0] == both[1] and {"kl/mean", "rollout/ratio_mean", "rollout/logprob_diff_max"} <= both[0].keys()


def test_a_resumed_run_begins_with_the_weights_of_its_step_and_evaluates_nothing_again() -> None:
    run = make({0, 2, 3})
    log = run.log
    assert run.trainer.run(3, first_step=3) is True
    assert log == [
        *sync_log(2),
        ("begin",),
        *step_of(3, [3, 1]),
        ("phase", "evaluate"),
        ("evaluate", 3),
        ("record", 3),
        ("checkpoint", 3),
        ("end",),
    ]


def test_a_run_that_is_over_makes_no_step() -> None:
    run = make({0, 3})
    log = run.log
    assert run.trainer.run(3, first_step=4) is True
    assert log == [*sync_log(3), ("begin",), ("end",)]


def test_a_run_that_ends_with_its_best_model_evaluates_that_one() -> None:
    run = make({0, 3})
    log = run.log
    run.watch.best = 2
    assert run.trainer.run(3) is True
    assert log[log.index(("end",)) :] == [
        ("end",),
        ("sleep", 2),
        *sync_log(4),  # a new version: these weights are newer than the weights of step 3
        ("phase", "evaluate"),
        ("evaluate", 3),
        ("final", 3, 2),
    ]


def test_a_checkpoint_on_demand_is_that_of_the_steps_that_were_made() -> None:
    run = make(set())
    log = run.log
    run.trainer.run(2)
    assert run.trainer.save_checkpoint(Path("there")) == Path("there/checkpoint-2") and log[-1] == ("save", 2)


def test_a_run_ends_when_the_checkpointer_says_so() -> None:
    run = make(set())
    log = run.log
    run.watch.stop_after = 2
    assert run.trainer.run(5) is False
    assert log[-1] == ("checkpoint", 2)


def test_fault_23_updates_that_are_skipped_again_and_again_end_the_run() -> None:
    run = make(set())
    log = run.log
    counts = iter([0, 1, 2, 3])
    run.models["actor"].result = lambda: UpdateResult("actor", {}, bad_in_a_row=next(counts))
    run.trainer.max_bad_updates = 3
    with expect_error(DivergedError, field="actor", value=3):
        run.trainer.run(9)
    assert ("sync", 3) in log and ("sync", 4) not in log, "weights are not handed on any more"


def test_fault_23_weights_that_are_not_finite_are_never_synced() -> None:
    run = make(set())
    log = run.log
    run.models["actor"].result = lambda: UpdateResult("actor", {"actor/not_finite": 1.0}, is_finite=False)
    with pytest.raises(
        DivergedError, match=r"optimizer's state of actor are not finite: this step is neither saved nor sent"
    ):
        run.trainer.run(9)
    assert ("sync", 0) in log and ("sync", 1) not in log and ("checkpoint", 1) not in log
    assert log[-1] == ("record", 1) and run.watch.metrics[1]["actor/not_finite"] == 1.0


def test_nothing_is_recorded_before_training_without_an_evaluation() -> None:
    run = make(set())
    log = run.log
    run.trainer.run(1)
    assert log[:6] == [*sync_log(0), ("begin",), ("phase", "generate")]


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_update_gets_a_complete_batch(with_reference: bool) -> None:
    run = make({1}, *["reference"] * with_reference)
    run.trainer.run(1)
    batch = last_batch(run.models["actor"])
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.old_logprobs is not None and batch.advantages is not None and batch.old_values is None
    assert batch.token_ids[:5].tolist() == [103, 103, 4000, 4001, 4002]  # prompt 3 came first
    assert torch.equal(batch.old_logprobs, torch.full((20,), -2.0))
    if batch.ref_logprobs is not None:
        assert torch.equal(batch.ref_logprobs, torch.full((20,), -3.0))
    assert (batch.ref_logprobs is not None) == with_reference
    # Scores 0 and 1 in each group: -+ sqrt(1/2) on the response tokens.
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]).mul(0.5**0.5).repeat_interleave(5) * batch.loss_mask
    torch.testing.assert_close(batch.advantages, expected, rtol=0, atol=3e-6)


def test_metrics_of_all_parts_arrive_in_one_record() -> None:
    run = make({1}, "reference", "critic")
    run.trainer.run(1)
    metrics = run.watch.metrics[1]
    assert metrics["reward/mean"] == 0.5 and metrics["rollout/num_tokens"] == 12.0
    assert metrics["loss/actor"] == metrics["loss/critic"] == 0.5 and metrics["evaluate/reward"] == 1.0
    # The engine said -4.0, -4.001, ... and -2.2 at most; the trainer says -2 of every token.
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(2.102, abs=1e-5)


def test_an_error_in_a_part_ends_the_run() -> None:
    run = make(set())
    log = run.log

    def broken(trajectory: Trajectory) -> float:
        raise ValueError("the grader fails")

    run.reward.value = broken
    with pytest.raises(ValueError, match="the grader fails"):
        run.trainer.run(2)
    assert ("update", "actor") not in log and ("record", 1) not in log


def test_fault_25_a_lost_response_ends_the_step_before_anything_learns_and_the_next_run_draws_it() -> None:
    sampler = PromptSampler(4, 2, seed=1, shuffle=True)
    whole = make(set(), sampler=PromptSampler(4, 2, seed=1, shuffle=True))
    whole.trainer.run(3)
    run = make(set(), sampler=sampler, lose=2)
    saved: dict[str, Any] = {}
    run.watch.save = lambda: saved.update(sampler.state_dict())
    with expect_error(LostTrajectory, field="prompt", value="no completion", remedy="trainer.max_restarts"):
        run.trainer.run(3)
    assert run.log.count(("update", "actor")) == 1 and ("sync", 1) in run.log and ("sync", 2) not in run.log
    again = PromptSampler(4, 2, seed=1, shuffle=True)
    again.load_state_dict(saved)
    resumed = make(set(), sampler=again)
    resumed.trainer.run(3, first_step=2)

    def generate_log(made: Run) -> Log:
        return [line for line in made.log if line[0] == "generate"]

    assert generate_log(resumed) == generate_log(whole)[1:] and generate_log(run) == generate_log(whole)[:2]


def test_values_are_known_before_anything_is_updated() -> None:
    run = make(set(), "critic")
    run.trainer.run(1)
    for model in (run.models["critic"], run.models["actor"]):
        batch = last_batch(model)
        assert batch.old_values is not None and batch.bootstrap_values is not None
        assert torch.equal(batch.old_values, torch.full((20,), 0.25))
        assert torch.equal(batch.bootstrap_values, torch.full((4,), 2.5))
        assert batch.old_logprobs is not None and batch.advantages is not None and batch.returns is not None


def test_the_critic_alone_learns_in_its_first_steps() -> None:
    run = make(set(), "critic", warmup_steps=2)
    log = run.log
    run.trainer.run(3)
    assert [line for line in log if line[0] == "update"] == [("update", "critic")] * 3 + [("update", "actor")]
    # The engines still get weights and a version in every step.
    assert [line for line in log if line[0] == "sync"] == [("sync", version) for version in range(4)]
    metrics = run.watch.metrics
    assert ["loss/actor" in metrics[step] for step in (1, 2, 3)] == [False, False, True]
    assert all("loss/critic" in metrics[step] for step in (1, 2, 3))


@pytest.mark.parametrize(("every", "before"), [(0, []), (1, [2, 3, 4, 5]), (2, [3, 5]), (3, [4])])
def test_the_reference_takes_over_the_actors_weights_when_it_is_due(every: int, before: list[int]) -> None:
    run = make(set(), "reference", refresh_steps=every)
    log = run.log
    run.trainer.run(5)
    refreshed, step = [], 0
    for line in log:
        step += line[0] == "generate"
        if line == ("refresh", "actor"):
            refreshed.append(step)
    assert refreshed == before
    says = SAYS["actor"] if before else SAYS["reference"]
    logprobs = last_batch(run.models["actor"]).ref_logprobs
    assert logprobs is not None and logprobs.unique().tolist() == [says]


def test_a_refreshed_reference_speaks_with_its_new_weights_in_the_same_step() -> None:
    run = make(set(), "reference", refresh_steps=1)
    log = run.log
    run.trainer.run(2)
    assert log[log.index(("refresh", "actor")) - 1 :][:3] == [
        ("phase", "reference"),
        ("refresh", "actor"),
        ("reference",),
    ]


def test_metrics_that_only_other_ranks_know_are_recorded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank that holds neither model has no results of its own.
    elsewhere = asdict(UpdateResult("actor", {"loss/elsewhere": 7.0}))
    monkeypatch.setattr("rlhf_mcore.trainer.divergence.all_gather_json", lambda mine: [mine, [elsewhere]])
    run = make(set(), "critic")
    for model in (run.models["critic"], run.models["actor"]):
        model.result = lambda: None
    run.trainer.run(1)
    metrics = run.watch.metrics[1]
    assert metrics["loss/elsewhere"] == 7.0 and "loss/actor" not in metrics


def test_dynamic_sampling_draws_until_the_step_is_full() -> None:
    run = make(set())
    log = run.log
    run.trainer.source = replace(run.source, fill_step=DynamicSampling(max_batches=3).fill_step)

    run.reward.value = lambda t: float(t.sample * (1 - t.prompt.index % 2))  # equal for odd prompts
    run.trainer.run(1)
    # Prompts 3, 1 teach nothing; 0 and 2 do, and come in the second batch.
    assert [line[1] for line in log if line[0] == "generate"] == [[3, 1], [0, 2]]
    assert log.count(("sleep", 2)) == 1
    batch = last_batch(run.models["actor"])
    assert batch.token_ids[::5].tolist() == [100, 100, 102, 102]
    metrics = run.watch.metrics[1]
    assert metrics["rollout/num_batches"] == 2.0 and metrics["rollout/informative_fraction"] == 0.5


def test_greedy_responses_are_scored_and_compared_with_and_nothing_learns_from_them() -> None:
    run = make(set())
    run.trainer.source = replace(
        run.source, sampling=Sampling(n=2, baseline=True), exchange=RowExchange(2, baselines=True)
    )
    run.trainer.learner = replace(
        run.trainer.learner, compute_advantages=AdvantageComputer(AlgorithmConfig(advantage="remax"))
    )
    run.reward.value = lambda t: [1.0, 0.0, 0.25][t.sample] + t.prompt.index
    run.trainer.run(1)
    assert ("score", 3) in run.log and ("rollouts", 1, 4) in run.log
    batch = last_batch(run.models["actor"])
    assert batch.advantages is not None and batch.num_rows == 4
    assert batch.advantages[batch.loss_mask].tolist() == [0.75] * 3 + [-0.25] * 3 + [0.75] * 3 + [-0.25] * 3
    metrics = run.watch.metrics[1]
    assert (metrics["reward/mean"], metrics["reward/baseline_mean"]) == (2.5, 2.25)  # for prompts 3 and 1


def test_a_prompt_whose_samples_differ_from_the_greedy_response_alone_stays_in_the_step() -> None:
    run = make(set())
    fill_step = DynamicSampling(max_batches=3).fill_step
    exchange = RowExchange(2, baselines=True)
    run.trainer.source = replace(
        run.source, sampling=Sampling(n=2, baseline=True), exchange=exchange, fill_step=fill_step
    )
    run.trainer.learner = replace(
        run.trainer.learner, compute_advantages=AdvantageComputer(AlgorithmConfig(advantage="remax"))
    )
    # Greedy responses to prompts 3 and 1 differ from the samples or do not; 0 and 2 come when there are too few.
    run.reward.value = lambda t: float(t.sample == 2 and t.prompt.index != 1)
    run.trainer.run(1)
    batch = last_batch(run.models["actor"])
    assert batch.prompts is not None and [p.index for p in batch.prompts] == [3, 0]
    assert batch.baselines is not None and batch.baselines.tolist() == [1.0] * 4
