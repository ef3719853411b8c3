"""Sync with engines in separate processes. There are four trainer ranks, and engines start, are killed and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all
from tests.distributed.remote_bridge_worker import CHANGES, TIMEOUT_S
from tests.distributed.world import World

# Elements of the models of tests/distributed/models.py, counted by hand: width 64, 97 tokens, 4 query
# and 2 key heads of 32, MLP width 96.
NORMS = 2 * 64 + 2 * 32  # per layer
ATTENTION = 128 * 64 + 2 * 64 * 64 + 64 * 128
DENSE_LAYER = NORMS + ATTENTION + 3 * 96 * 64
EXPERT_LAYER = NORMS + ATTENTION + 4 * 64 + 4 * 3 * 48 * 64
BYTES = {
    "uneven": 4 * (97 * 64 + 7 * DENSE_LAYER + 64),  # one tensor for input and output embedding
    "layouts": 4 * (2 * 97 * 64 + 4 * DENSE_LAYER + 64),
    "experts": 4 * (2 * 97 * 64 + 4 * EXPERT_LAYER + 64),
}


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("remote")
    return four_ranks.run("remote_bridge_worker", directory)


@pytest.mark.parametrize("part", BYTES)
def test_every_layout_arrives_bit_for_bit_at_the_lower_bound(findings: Any, part: str) -> None:
    """Trainer ranks receive nothing. An engine rank receives every byte, because it starts without weights."""

    def check(found: Any) -> None:
        assert found["stats"] == [[0, 0]] * 4
        for answer, weights in zip(found["answers"], found["weights"], strict=True):
            assert answer["answer"]["received_bytes"] == BYTES[part] and answer["answer"]["local_bytes"] == 0
            assert weights["wrong"] == [] and weights["version"] == answer["answer"]["version"] == found["version"]

    check_all(findings[part], check)


def test_what_has_changed_travels_alone_and_who_comes_late_gets_everything(findings: Any) -> None:
    found = findings["some_tensors"]
    for part, size in (("some", 64 * 4), ("late", BYTES["layouts"]), ("again", 64 * 4)):
        answers, weights = found[part]
        assert [answer["answer"]["received_bytes"] for answer in answers] == [size] * len(answers), part
        assert [held["wrong"] for held in weights] == [[]] * len(weights), part
        assert len({held["version"] for held in weights}) == 1
    assert len(found["late"][0]) == len(found["again"][0]) == 3


def test_only_changed_elements_travel_until_an_engine_has_lost_one(findings: Any) -> None:
    """Doubling a norm changes all its 64 words of 4 bytes for two engines. No other weight changes."""
    found = findings["only_changes"]
    for number, sync in enumerate(found):
        assert [(held["wrong"], held["version"]) for held in sync["weights"]] == [([], number)] * 2
        sent, whole = (sum(column) for column in zip(*sync["sent"], strict=True))
        assert whole == 2 * BYTES["layouts"]
        received = sum(answer["answer"]["received_bytes"] for answer in sync["answers"])
        if number in (0, 3):
            assert sent == received == whole
        else:
            assert 2 * 64 * 5 <= sent == received < whole / 20


def test_engines_that_read_messages_get_every_bit_at_the_lower_bound(findings: Any) -> None:
    """Trainer and engines run in processes with the installed library. contrib/nixl/tests checks the calls."""
    found = findings["by_nixl"]
    if found is None:
        pytest.skip("nixl is not installed")
    for version in range(2):
        sync = found[f"sync {version}"]
        assert sync["stats"] == [[0, 0]] * 4
        assert [answer["answer"]["received_bytes"] for answer in sync["answers"]] == [BYTES["layouts"]] * 3
        assert [(held["wrong"], held["version"]) for held in sync["weights"]] == [([], version)] * 3
    assert [(held["wrong"], held["version"]) for held in found["killed"]] == [([], 2)] * 2


def test_fault_36_an_engine_that_comes_after_an_update_gets_what_was_sent_before_it(findings: Any) -> None:
    assert len(findings["sent_again"]) == 2
    for before, after in findings["sent_again"].values():
        assert [(held["wrong"], held["version"]) for held in before] == [([], 0)]
        assert [(held["wrong"], held["version"]) for held in after] == [([], 1)]


def test_a_group_is_kept_as_long_as_the_same_processes_take_part(findings: Any) -> None:
    joined = ["pause", "join", "sync", "resume"]
    kept = ["pause", "sync", "resume"]
    assert findings["some_tensors"]["log"][-14:] == [*joined, *kept, *joined, *kept]


@pytest.mark.parametrize("during", ["join", "sync"])
@pytest.mark.parametrize("kind", ["kill", "stop", "raise"])
def test_fault_20_an_engine_that_fails_is_left_out_and_the_others_are_whole(
    findings: Any, during: str, kind: str
) -> None:
    (found,) = [found for found in findings["faults"] if found["case"] == [during, kind]]
    told = {"kill": "is gone", "stop": "does not answer", "raise": "OSError: the engine has no memory left"}[kind]
    (problem,) = [problem for problem in found["problems"] if problem.startswith("bad")]
    assert problem.endswith(told)
    assert found["members"] == ["a", "b"]
    for moment in ("weights", "next"):
        assert [held["wrong"] for held in found[moment]] == [[], []]
        assert len({held["version"] for held in found[moment]}) == 1
    assert [held["version"] for held in found["next"]] == [found["weights"][0]["version"] + 50] * 2


def test_an_engine_that_fails_holds_the_trainer_no_longer_than_was_said(findings: Any) -> None:
    """torch's own limit is half an hour. If the machine runs more processes than cores, the deadline is extended a little."""
    assert max(found["seconds"] for found in findings["faults"]) < 10 * TIMEOUT_S


def test_engines_without_whole_weights_have_none_that_may_be_used(findings: Any) -> None:
    """A trainer rank fails. All ranks raise with its name, and the engine rejects generation until the next sync."""
    found = findings["own_fault"]
    assert found["alone"] == [0, 0]  # no engine was there
    assert [error.split(": ", 1)[-1] for error in found["errors"]] == [
        "by a test" if rank == 2 else "rank 2: ZeroDivisionError: by a test" for rank in range(4)
    ]
    assert "PeersLost" in found["answer"][0]
    assert found["weights"][0]["version"] == -1
    assert found["after"][0]["wrong"] == [] and found["after"][0]["version"] == 3


def test_a_machine_imports_what_it_lacks_once(findings: Any) -> None:
    """Two engines on one machine share one copy of the data sent to it.

    An engine next to one stage receives only the other stage.
    """
    found = findings["nodes"]
    assert [held["wrong"] for held in found["weights"]] == [[]] * 4
    imported = {answer["engine"]: answer["answer"]["imported"] for answer in found["answers"]}
    first_stage = 4 * (97 * 64 + 2 * DENSE_LAYER)
    assert imported["a"] == BYTES["layouts"] - first_stage
    assert imported["b"] + imported["c"] == imported["d"] == BYTES["layouts"]
    assert min(imported["b"], imported["c"]) > 0.4 * BYTES["layouts"]


def test_engines_that_come_and_go_leave_nothing_behind(findings: Any) -> None:
    """Checks descriptors, threads and memory of four trainer ranks and of the remaining engine."""
    found = findings["changes"]
    assert found["wrong"] == [[]] * (CHANGES + 4)
    for first, *later in zip(*found["left"], strict=True):
        assert [seen[:2] for seen in later] == [first[:2]] * len(later)
        assert later[-1][2] - first[2] < 8 * 1024  # KiB; the messages of one group alone take about 100
