"""Real engines under a real Ray that are killed, stopped, silenced, added and removed while they generate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import EnginesLost
from tests.commands import descendants
from tests.e2e.remote.fleets import collected, plan, publish, requests, running
from tests.e2e.rollout.tiny import save_model

NEW_TOKENS = 100


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        save_model(folder / name, "qwen3", seed)
    return folder / "a", folder / "b"


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> Iterator[tuple[Fleet, list[str]]]:
    """One Ray and two engines for all tests that do not end them."""
    with running(plan(directories[0], num_engines=2, timeout_s=4.0, max_num_seqs=8)) as made:
        yield made


@pytest.fixture
def undisturbed(pair: tuple[Fleet, list[str]], directories: tuple[Path, Path]) -> dict[int, list[int]]:
    """What the requests of a test get where nothing happens."""
    fleet, notes = pair
    publish(fleet, 0, *directories)
    notes.clear()
    drawn = fleet.generate(requests(6, 4, NEW_TOKENS))
    return {completion.request_id: completion.token_ids.tolist() for completion in drawn}


def pids(fleet: Fleet, directories: tuple[Path, Path], name: str) -> list[int]:
    """Process ids of the engines, in no order."""
    publish(fleet, 0, *directories, name=name)
    return [int(line) for line in (directories[0].parent / f"{name}.pids").read_text().split()]


def kill(pid: int, folder: Path) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int, folder: Path) -> None:
    os.kill(pid, signal.SIGSTOP)


def silence(pid: int, folder: Path) -> None:
    """It steps and answers, and draws nothing."""
    (folder / f"silent.{pid}").touch()


@pytest.mark.parametrize(
    ("fault", "reason"), [(kill, ""), (freeze, "has not answered for 4 s"), (silence, "has drawn no token for 4 s")]
)
def test_fault_18_and_19_and_25_every_request_is_answered_once_whatever_happens_to_an_engine(
    pair: tuple[Fleet, list[str]],
    directories: tuple[Path, Path],
    undisturbed: dict[int, list[int]],
    fault: Callable[[int, Path], None],
    reason: str,
) -> None:
    fleet, notes = pair
    victim = pids(fleet, directories, fault.__name__)[0]
    fleet.submit(requests(6, 4, NEW_TOKENS))
    fault(victim, directories[0].parent)
    drawn = collected(fleet, 24, *directories)
    assert {number: found.token_ids.tolist() for number, found in drawn.items()} == undisturbed
    [note] = [note for note in notes if "is ready" not in note]
    assert "has failed and is started again" in note and reason in note
    while any(found.state == "starting" for found in fleet.status()):
        fleet.collect(0.2)
    assert len(publish(fleet, 0, *directories)) == 2
    with pytest.raises(ProcessLookupError):  # also where it was stopped
        os.kill(victim, 0)


def test_fault_18_where_all_engines_are_killed_weights_come_first(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], undisturbed: dict[int, list[int]]
) -> None:
    fleet, _ = pair
    victims = pids(fleet, directories, "all")
    fleet.submit(requests(6, 4, NEW_TOKENS))
    for victim in victims:
        kill(victim, directories[0])
    generated = fleet.begin(requests(6, 4, NEW_TOKENS))  # an evaluation at the same time
    drawn = collected(fleet, 24, *directories)
    assert {number: found.token_ids.tolist() for number, found in drawn.items()} == undisturbed
    assert {found.request_id: found.token_ids.tolist() for found in generated(300) or ()} == undisturbed


def test_fault_33_engines_come_and_go_while_they_generate(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], undisturbed: dict[int, list[int]]
) -> None:
    fleet, _ = pair
    before = [found.name for found in fleet.status()]
    while any(found.state != "serving" for found in fleet.status()):
        fleet.collect(0.5)
        publish(fleet, 0, *directories)
    fleet.submit(requests(6, 4, NEW_TOKENS))
    [added] = fleet.add(1)
    fleet.drain(before[0])
    first = collected(fleet, 12, *directories)
    while next(found for found in fleet.status() if found.name == added).state == "starting":
        first |= {found.request_id: found for found in fleet.collect(0.2)}
    publish(fleet, 0, *directories)
    fleet.submit(requests(6, 4, NEW_TOKENS, first_id=100))
    fleet.remove(before[1])
    drawn = first | collected(fleet, 48 - len(first), *directories)
    tokens = {number: found.token_ids.tolist() for number, found in drawn.items()}
    assert tokens == undisturbed | {100 + number: found for number, found in undisturbed.items()}
    assert [found.name for found in fleet.status()] == [added]


def test_fault_32_without_ray_there_is_one_message_and_no_wait(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The last one: nothing is left of it."""
    fleet, _ = pair
    publish(fleet, 0, *directories)
    fleet.submit(requests(6, 4, NEW_TOKENS))
    head: Any = fleet._machines._head  # type: ignore[attr-defined]
    [raylet] = [pid for pid in descendants(head.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    everything = descendants(head.pid)
    kill(raylet, directories[0])
    with pytest.raises(EnginesLost, match=r"^Ray on this machine has ended\. .* the same command continues it"):
        while True:
            fleet.collect(30)
    assert head.wait(120) == 0 and [pid for pid in everything if not has_ended(pid)] == []
    assert capfd.readouterr() == ("", "")
