"""The source and the publisher of pipelined training around engines that are played."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.trainer.ahead import Schedule
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.pipeline import FirstRank, PipelinedBatches, RemotePublisher
from rlhf_mcore.types import Score, Trajectory
from tests.unit.trainer.test_ahead import PROMPTS, SAMPLES, Engines, ahead_of

pytestmark = pytest.mark.usefixtures("world")


class Record:
    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def rollouts(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        assert len(trajectories) == len(scores)

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


@contextmanager
def pipeline(schedule: Schedule) -> Iterator[tuple[PipelinedBatches, RemotePublisher, Bridge]]:
    engines = Engines(random.Random(3))
    bridge, record = Bridge(engines), Record()
    ahead, _ = ahead_of(engines, schedule)
    first = FirstRank(ahead, lambda: bridge.is_lost)
    source = PipelinedBatches(PROMPTS, first, RowExchange(SAMPLES, asynchronous=True), record, bridge.sync)
    publisher = RemotePublisher(bridge, record, source.drain if schedule.drain else None)
    with ahead.run():
        yield source, publisher, bridge


def test_rows_and_metrics_of_steps_that_were_sampled_ahead() -> None:
    with pipeline(Schedule(2, 1, in_order=True, drain=True)) as (source, publisher, bridge):
        publisher.publish(0)
        versions: list[Any] = []
        for step in (1, 2, 3):
            batch, metrics = source.next_batch(step)
            assert batch.num_rows == 4 and batch.versions is not None and batch.num_rows == len(batch.scores)
            versions.append(sorted(set(batch.versions[batch.loss_mask].tolist())))
            assert metrics["rollout/redrawn"] == 0 and metrics["reward/mean"] == pytest.approx(
                float(batch.scores.mean())
            )
            publisher.publish(step)
    assert versions == [[0], [0], [1]] and bridge.synced == [0, 1, 2, 3]


def test_fault_18_engines_that_replace_all_others_get_the_weights_that_the_trainer_has() -> None:
    """Before the update those of the step before, after it those of the step; each under its own version."""
    with pipeline(Schedule(2, 1, in_order=True, drain=True)) as (source, publisher, bridge):
        publisher.publish(0)
        bridge.lose_all()
        source.next_batch(1)
        assert bridge.synced == [0, 0]
        bridge.lose_all()
        assert source.first is not None
        source.first.ahead.fill(2)  # in flight, so that publishing has to wait for it
        publisher.publish(1)
    assert bridge.synced == [0, 0, 1, 1]
