"""Save with two ranks while one of them fails. All ranks report the failure, no rank hangs, and earlier checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.small_disk import small_disk

FILES = ["actor/part-0", "actor/part-1", "state.json"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of one MiB if this user may mount one, otherwise a plain folder."""
    folder = tmp_path_factory.mktemp("small")
    with small_disk(folder, 1024):
        yield folder


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, list[Any]]:
    return run_world("distributed.checkpoint_worker", 2, tmp_path_factory.mktemp("run"), str(small), timeout_s=120)


def test_ranks_write_one_checkpoint(findings: dict[str, list[Any]]) -> None:
    assert findings["together"] == [[FILES, [], 10]] * 2


def test_fault_05_and_08_what_was_begun_and_not_finished_does_not_get_into_the_next_save(
    findings: dict[str, list[Any]],
) -> None:
    assert findings["begun_and_never_finished"] == [[FILES, [], 1]] * 2


def test_fault_09_a_disk_that_is_full_for_one_rank(findings: dict[str, list[Any]]) -> None:
    for message, left in findings["full_disk"]:
        kind, _, text = message.partition(": ")
        assert kind in ("DiskFullError", "SaveError")
        assert text.startswith("checkpoint-20 was not saved: rank 1: [Errno ")
        assert "No space left on device" in message or "File too large" in message
        assert message.endswith("Earlier checkpoints are untouched.")
        assert left == [[10], 10, []]
    assert findings["full_disk"][0] == findings["full_disk"][1]


def test_fault_09_a_disk_that_is_full_at_the_manifest(findings: dict[str, list[Any]]) -> None:
    for message, left in findings["full_disk_at_the_manifest"]:
        assert message.startswith("DiskFullError: checkpoint-20 was not saved: rank 0: [Errno 28] No space left")
        assert left == [[10], 10, []]


def test_fault_12_a_moment_of_broken_storage_costs_a_second_attempt(findings: dict[str, list[Any]]) -> None:
    assert findings["moment"] == [[0, [[10], 10, []]], [1, [[10], 10, []]]]


def test_fault_12_storage_that_stays_broken_ends_the_save_on_all_ranks(findings: dict[str, list[Any]]) -> None:
    for message, attempts, left in findings["broken_for_good"]:
        assert message.startswith(
            "TransientSaveError: checkpoint-10 was not saved: rank 1: [Errno 5] Input/output error"
        )
        assert attempts == 3
        assert left == [[], None, []]


def test_any_error_of_a_rank_is_told_to_all(findings: dict[str, list[Any]]) -> None:
    for message, left in findings["mistake_on_a_rank"]:
        assert message.startswith("SaveError: checkpoint-10 was not saved: rank 0: IndexError: list index out of range")
        assert left == [[], None, []]


def test_the_link_moves_when_all_ranks_have_finished_and_not_before(findings: dict[str, list[Any]]) -> None:
    assert findings["in_the_background"] == [[None, [[10], 10, []]]] * 2


def test_ranks_save_differences_to_the_same_base(findings: dict[str, list[Any]]) -> None:
    kinds = ["full", "checkpoint-1", "full"]
    assert findings["deltas"] == [[kinds, [[20.0] * 4, [21.0] * 4]]] * 2


def test_a_signal_to_any_rank_counts_for_all(findings: dict[str, list[Any]]) -> None:
    def decision(*reasons: str, best: bool = False, stop: bool = False) -> dict[str, Any]:
        return {"reasons": list(reasons), "best": best, "stop": stop}

    first, second = findings["decisions"]
    assert first == second
    assert first[:4] == [
        decision(),
        decision("signal"),
        decision("steps", "best", best=True),
        decision("stop", stop=True),
    ]
    assert first[4].startswith("ConfigError: checkpoint.metric_for_best_model='evaluate/reward'")


def test_what_fails_on_one_rank_is_raised_on_all(findings: dict[str, list[Any]]) -> None:
    assert [seen[0] for seen in findings["failures"]] == ["ConfigError: a.b=1 is wrong"] * 2
    assert [seen[1] for seen in findings["failures"]] == ["RanksFailed: rank 1: KeyError: 'lost'", "KeyError: 'lost'"]
    assert [seen[2] for seen in findings["failures"]] == [0, 1]
