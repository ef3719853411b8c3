"""The source and the publisher of pipelined training around engines that are played."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.data.source import PromptBatches
from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.sampling.rollouts import request_of
from rlhf_mcore.trainer import pipeline as pipeline_module
from rlhf_mcore.trainer.ahead import PromptGroup, SamplingSchedule
from rlhf_mcore.trainer.batches import ColocatedBatches, FillStep, Rollout, take_next_batch
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.pipeline import FirstRank, FleetSampler, PipelinedBatches
from rlhf_mcore.trainer.publishers import RemotePublisher
from rlhf_mcore.types import Completion, EngineWork, Job, Request, Sampling, Score, Trajectory
from tests.episodes import resolved_future
from tests.unit.trainer.records import Streaming, batch_sampler
from tests.unit.trainer.test_ahead import PROMPTS, SAMPLES, Engines, ahead_of

NO_TEXT: Any = None
pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of these tests continue at each poll."""
    monkeypatch.setattr(pipeline_module, "POLL_S", 0.0)


class Record:
    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    beats = 0

    def progress(self, text: str) -> None: ...

    def beat(self) -> None:
        self.beats += 1

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def final(self, last_step: int, step: int, metrics: Mapping[str, float]) -> None: ...


class Bridge:
    """Engines that were lost are back with the next weights."""

    def __init__(self, engines: Engines) -> None:
        self.engines, self.synced, self.is_lost = engines, list[int](), False

    def sync(self, version: int) -> SyncStats:
        self.synced.append(version)
        self.engines.publish(version)
        self.engines.at_once, self.is_lost = 3, False
        return SyncStats(0.0, received_bytes=0, local_bytes=0, peak_bytes=0)

    def lose_all(self) -> None:
        self.engines.at_once, self.is_lost = 0, True

    def needs_weights(self) -> bool:
        """Return whether all engines are lost. The engines continue before each answer, because waits ask this."""
        self.engines.finish()
        return self.is_lost


@contextmanager
def pipeline(
    schedule: SamplingSchedule, fill_step: FillStep = take_next_batch
) -> Iterator[tuple[PipelinedBatches, RemotePublisher, Bridge]]:
    engines = Engines(random.Random(3))
    bridge, record = Bridge(engines), Record()
    ahead, _ = ahead_of(engines, schedule)
    first = FirstRank(
        ahead,
        bridge.needs_weights,
        engines.begin,
        lambda: (EngineWork(3, 40, 0.5, preemptions=7), 2),
        lambda: 0,
    )
    exchange = RowExchange(SAMPLES, asynchronous=True)

    def sync_again(version: int) -> None:
        """Sync the last published weights again if in order, as ``cli.generation`` does from its copies."""
        bridge.sync(bridge.synced[-1] if schedule.in_order else version)

    source = PipelinedBatches(PROMPTS, first, exchange, record, sync_again, fill_step=fill_step)
    publisher = RemotePublisher(bridge, record, source.drain if schedule.drain else None)
    yield source, publisher, bridge


def test_rows_and_metrics_of_steps_that_were_sampled_ahead() -> None:
    with pipeline(SamplingSchedule(2, 1, in_order=True, drain=True)) as (source, publisher, bridge):
        publisher.publish(0)
        versions: list[Any] = []
        for step in (1, 2, 3):
            batch, metrics = source.next_batch(step)
            assert batch.num_rows == 4 and batch.versions is not None and batch.num_rows == len(batch.scores)
            versions.append(sorted(set(batch.versions[batch.loss_mask].tolist())))
            assert [metrics[f"throughput/engine_{name}"] for name in ("steps", "tokens", "busy_s")] == [3, 40, 0.5]
            assert metrics["rollout/other_version"] == 2
            assert metrics["rollout/preemptions"] == 7
            assert metrics["rollout/redrawn"] == 0 and metrics["reward/mean"] == pytest.approx(
                float(batch.scores.mean())
            )
            publisher.publish(step)
    assert versions == [[0], [0], [1]] and bridge.synced == [0, 1, 2, 3]


@pytest.mark.parametrize("in_order", [True, False])
def test_fault_18_and_36_engines_that_replace_all_others_get_weights_again(in_order: bool) -> None:
    """Before the update, engines get the last weights. After it they get the new weights, or in order those for requests in flight."""
    with pipeline(SamplingSchedule(2, 1, in_order=in_order, drain=True)) as (source, publisher, bridge):
        publisher.publish(0)
        bridge.lose_all()
        source.next_batch(1)
        assert bridge.synced == [0, 0]
        bridge.lose_all()
        assert source.first is not None
        source.first.ahead.fill(1)  # in flight, so that publishing has to wait for it
        publisher.publish(1)
        assert bridge.synced == [0, 0, 0 if in_order else 1, 1]
        waiting = source.first.ahead.finished_trajectories().values()
        versions = {version for found in waiting for each in found for _, version in each.versions}
        assert versions == ({0} if in_order else {0, 1})


def test_fault_18_all_engines_are_lost_in_the_middle_of_an_evaluation() -> None:
    with pipeline(SamplingSchedule(2, 1)) as (source, publisher, bridge):
        publisher.publish(4)
        bridge.lose_all()
        sampler = FleetSampler(source.first, NO_TEXT, lambda: bridge.sync(4), lambda: None)
        found = sampler.sample(PROMPTS[:3], Sampling(n=2), step=1)
        assert [(each.prompt.index, each.sample) for each in found] == [(p, s) for p in range(3) for s in range(2)]
    assert bridge.synced == [4, 4]


def test_tokens_of_engines_are_progress_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns pass before the responses are there, and tokens are sampled in the first two."""
    monkeypatch.setattr(pipeline_module, "TURN_S", 0.0)
    with pipeline(SamplingSchedule(2, 1)) as (source, _, bridge):
        assert source.first is not None
        tokens, beats = [5, 9, 9, 9], list[int]()

        def needs_weights() -> bool:
            if len(tokens) == 2:
                bridge.engines.finish(0)
            return False

        first = replace(source.first, needs_weights=needs_weights, num_sampled_tokens=lambda: tokens.pop(0))
        sampler = FleetSampler(first, NO_TEXT, lambda: None, lambda: beats.append(1))
        assert len(sampler.sample(PROMPTS[:1], Sampling(n=1), step=1)) == 1
    assert len(beats) == 2


def half_teach(trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
    """Prompts of odd numbers have equal scores."""
    return resolved_future([Score(0.5 if t.prompt.index % 2 else float(t.sample)) for t in trajectories])


@pytest.mark.parametrize(
    "schedule", [SamplingSchedule(2, 1, in_order=True, drain=True), SamplingSchedule(2, 2), SamplingSchedule(2, 0, 1.5)]
)
def test_prompts_that_teach_nothing_are_replaced_by_the_next_ones(schedule: SamplingSchedule) -> None:
    """Each prompt is learned from once, or was dropped."""
    with pipeline(schedule, DynamicSampling(10).fill_step) as (source, publisher, _):
        assert source.first is not None
        ahead, taken, draws = source.first.ahead, list[int](), 0
        ahead._begin_scores, take = half_teach, ahead.take

        def record_take(wanted: int) -> list[PromptGroup]:
            groups = take(wanted)
            taken.extend(group.number for group in groups)
            return groups

        ahead.take = record_take  # type: ignore[method-assign]
        publisher.publish(0)
        for step in range(1, 6):
            batch, metrics = source.next_batch(step)
            draws += int(metrics["rollout/num_batches"])
            assert batch.num_rows == 4 and sorted(batch.scores.tolist()) == [0, 0, 1, 1]
            publisher.publish(step)
        waiting = [group["number"] for group in ahead.state_dict()["groups"]]
        assert sorted([*taken, *waiting]) == list(range(len(taken) + len(waiting))) and draws > 5
        assert not schedule.in_order or taken == sorted(taken)


def test_without_staleness_prompts_and_seeds_are_those_of_colocated_engines() -> None:
    asked: dict[str, list[list[tuple[list[int], int]]]] = {"apart": [], "beside": []}

    class Beside(Streaming):
        def draw(self, requests: Sequence[Request]) -> list[Completion]:
            asked["beside"].append([(list(request.prompt_ids), request.seed) for request in requests])
            return [completion(request) for request in requests]

    def completion(request: Request) -> Completion:
        ids = np.array([request.seed % 1000, 0], np.int32)
        return Completion(request.request_id, ids, np.full(2, -0.5, np.float32), ((0, 0),), "stop")

    with pipeline(SamplingSchedule(2, 0), DynamicSampling(10).fill_step) as (source, publisher, bridge):
        assert source.first is not None
        ahead, begin = source.first.ahead, bridge.engines.begin
        ahead._begin_scores = half_teach

        def record_jobs(jobs: Sequence[Job]) -> list[Future[Trajectory]]:
            asked["apart"].append([(list(job.prompt_ids), request_of(job).seed) for job in jobs])
            return begin(jobs)

        ahead._begin_jobs = record_jobs
        sampler = PromptSampler(len(PROMPTS), 2, seed=5, shuffle=True)
        prompts, sampling = PromptBatches(PROMPTS, sampler), Sampling(n=SAMPLES, seed=9)
        together: Any = (
            batch_sampler(Beside()),
            sampling,
            half_teach,
            DynamicSampling(10).fill_step,
            RowExchange(SAMPLES),
            source.recorder,
        )
        other = ColocatedBatches(prompts, *together)
        publisher.publish(0)
        for step in range(1, 6):
            batches = [each.next_batch(step)[0] for each in (source, other)]
            assert batches[0].token_ids.tolist() == batches[1].token_ids.tolist()
            bridge.engines.version = 0  # responses of this test hold it
    assert asked["apart"] == asked["beside"] and len(asked["apart"]) > 5
