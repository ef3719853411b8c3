from __future__ import annotations

import math

import pytest

from rlhf_mcore.config.schema import ScheduleConfig
from rlhf_mcore.mcore.optimizer import learning_rate


def rates(count: int, **settings: object) -> list[float]:
    cfg = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate(update, 8.0, cfg) for update in range(count)]


def test_constant() -> None:
    assert rates(3) == [8.0, 8.0, 8.0]
    assert rates(6, warmup_updates=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_ends_at_the_minimum_with_the_last_update_and_stays_there() -> None:
    assert rates(7, name="linear", total_updates=5) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    assert rates(6, name="linear", total_updates=5, min_lr=4.0) == [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]


def test_linear_after_warm_up() -> None:
    assert rates(7, name="linear", warmup_updates=2, total_updates=7) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine() -> None:
    half = 4.0 * (1 + math.sqrt(0.5)), 4.0 * (1 - math.sqrt(0.5))
    assert rates(6, name="cosine", total_updates=5) == pytest.approx([8.0, half[0], 4.0, half[1], 0.0, 0.0])
    found = rates(5, name="cosine", warmup_updates=2, total_updates=5, min_lr=2.0)
    assert found == pytest.approx([4.0, 8.0, 8.0, 5.0, 2.0])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_runs_that_end_in_or_right_after_the_warm_up(name: str) -> None:
    assert rates(1, name=name, total_updates=1) == [8.0]
    assert rates(2, name=name, warmup_updates=2, total_updates=2) == [4.0, 8.0]
    assert rates(3, name=name, warmup_updates=2, total_updates=3) == [4.0, 8.0, 8.0]
