"""Test the reports of ranks to the process that started them, and the rank that it blames for a hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.supervisor import read_last_lines
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability import rank_file
from rlhf_mcore.observability.rank_file import CONSEQUENCE, FAILURE, OF_TORCHRUN, USER, VARIABLE, RankFiles


class World:
    """Ranks with process ids from 1000 on that have reported their start, and the reader of their files."""

    def __init__(self, count: int, gone: tuple[int, ...] = ()) -> None:
        self.files = RankFiles(has_ended=lambda pid: pid in gone)
        self.paths = [self.files.make(rank) for rank in range(count)]
        for rank in range(count):
            with self.rank(rank), patch("os.getpid", lambda rank=rank: 1000 + rank), patch("threading.Thread"):
                rank_file.note_start()

    @contextmanager
    def rank(self, number: int) -> Iterator[None]:
        """Act as this rank."""
        with patch.dict(os.environ, {VARIABLE: self.paths[number], "RANK": str(number)}):
            yield

    def wait(self, count: int, alive: tuple[int, ...]) -> tuple[str, list[int]] | None:
        """Advance the time, during which some ranks beat. Returns the first complaint."""
        for _ in range(count):
            for number in alive:
                with self.rank(number):
                    rank_file._update(lambda told: {"alive": told.get("alive", 0) + 1})
            if (problem := self.files.count(1.0)) is not None:
                return problem
        return None

    def all(self, *actions: Callable[[], None]) -> None:
        for number in range(len(self.paths)):
            self.one(number, *actions)

    def one(self, number: int, *actions: Callable[[], None]) -> None:
        with self.rank(number):
            for action in actions:
                action()


def watch(limit_s: int) -> Callable[[], None]:
    return lambda: rank_file.watch(limit_s)


def phase(name: str) -> Callable[[], None]:
    return lambda: rank_file.note_phase(name)


def test_a_rank_that_trains_ends_or_fails_is_read() -> None:
    world = World(2)
    assert not world.files.is_training() and [told.get("done") for told in world.files.read().values()] == [None, None]
    world.one(0, rank_file.note_training, phase("update"), rank_file.note_done)
    world.one(1, lambda: rank_file.note_error(USER, "a mistake"))
    told = world.files.read()
    assert world.files.is_training() and (told[0]["phase"], told[0]["done"]) == ("update", True)
    assert (told[1]["kind"], told[1]["message"], "done" in told[1]) == (USER, "a mistake", False)


def test_the_longest_error_is_read_and_a_shorter_one_after_it() -> None:
    world = World(1)
    world.one(0, lambda: rank_file.note_error(USER, "\U0001f600" * 50_000))  # 12 bytes each in JSON
    assert set(world.files.read()[0]["message"]) == {"\U0001f600"}
    world.one(0, lambda: rank_file.note_error(USER, "short"))
    assert world.files.read()[0]["message"] == "short"


def test_a_rank_whose_starter_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/proc/0/fd/99")
    rank_file.note_phase("update")
    rank_file.note_error(FAILURE, "text")


def test_the_end_of_a_log_is_shown_without_commands_to_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 2**20 + b"\n" + b"line\n" * 30 + b"\x1b[2Jred\xff\n" + b"y" * 900)
    found = read_last_lines(log)
    assert found == [*["    line"] * 18, "     [2Jred\N{REPLACEMENT CHARACTER}", f"    {'y' * 200}"]
    assert read_last_lines(tmp_path / "absent") == []


def test_an_error_is_told_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        raise ValueError("lost")
    except ValueError as error:
        assert terminal.cause(error).startswith(f"ValueError: lost ({__file__}:")


def test_nothing_is_told_without_a_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OF_TORCHRUN, str(tmp_path / "error.json"))
    assert not rank_file.is_read()
    rank_file.note_start()
    rank_file.note_done()
    assert not (tmp_path / "error.json").exists()


def test_fault_14_the_stopped_rank_is_blamed_and_not_the_one_that_waits_for_it() -> None:
    world = World(2)
    world.all(watch(30), phase("generate"))
    world.one(0, phase("exchange"))
    assert world.wait(30, alive=(0,)) is None
    message, blamed = world.wait(2, alive=(0,)) or ("", [])
    assert blamed == [1]
    assert message.startswith("rank 1 is stopped, or holds Python's lock") and "30 s (trainer.watchdog_s)" in message


def test_the_rank_that_is_behind_is_blamed_when_all_are_alive() -> None:
    world = World(2)
    world.all(watch(30), phase("score"))
    world.one(1, phase("exchange"))
    assert (world.wait(32, alive=(0, 1)) or ("", []))[1] == [0]


def test_a_rank_that_decodes_a_long_response_is_progress_of_the_run() -> None:
    world = World(2)
    world.all(watch(30), phase("generate"))
    assert world.wait(30, alive=(0, 1)) is None
    world.one(1, rank_file.beat)
    assert world.wait(30, alive=(0, 1)) is None
    assert world.wait(2, alive=(0, 1)) == (
        "no rank has started a new phase or sampled a token for 30 s (trainer.watchdog_s)",
        [0, 1],
    )


def test_fault_14_all_ranks_stopped_are_noticed_and_one_that_has_nothing_to_do_is_not() -> None:
    world = World(2)
    world.all(watch(30))
    world.one(0, watch(0))
    for _ in range(5):
        world.one(1, phase("generate"))
        assert world.wait(29, alive=(0, 1)) is None
    world.one(0, watch(30))
    assert (world.wait(32, alive=()) or ("", []))[1] == [0, 1]


def test_a_suspended_job_is_not_ended_when_it_wakes_up() -> None:
    times = iter([0.0, 86_400.0, 86_400.1])
    files = RankFiles(has_ended=lambda pid: False, clock=lambda: next(times))
    counted: list[float] = []
    files.count = lambda seconds: counted.append(seconds) or ("enough", [0])  # type: ignore[func-returns-value, method-assign]
    done: list[str] = []
    files.watch(lambda message, ranks: done.append(message))
    while not done:
        pass
    assert counted == [1.0]  # a day without observation does not count


def test_a_rank_that_left_while_the_others_wait_is_noticed() -> None:
    message, blamed = World(2, gone=(1001,)).wait(60, alive=(0,)) or ("", [])
    assert blamed == [1] and "ended in the middle of the run" in message


def make_closed_error() -> RuntimeError:
    return RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [(ConfigError("seed=x"), USER, 2), (KeyError("x"), FAILURE, 1), (make_closed_error(), CONSEQUENCE, 1)],
)
def test_whose_mistake_it_was_is_told_with_the_cause(
    error: Exception, kind: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(1)
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    with world.rank(0):
        try:
            raise error
        except Exception as caught:
            assert terminal.report(caught) == code
    told = world.files.read()[0]
    assert (told["kind"], str(error) in told["message"]) == (kind, True)
    assert ("Traceback" in capsys.readouterr().err) is (kind != USER)


def test_an_error_says_where_it_was_raised_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    world = World(1)
    with world.rank(0):
        try:
            raise ValueError("no access with hunter2-hunter2 at https://user:word@host/")
        except ValueError as error:
            terminal.report(error)
    text = world.files.read()[0]["message"]
    assert text.startswith("ValueError: no access with <redacted: MY_API_KEY> at https://<redacted>@host/")
    assert f"({os.path.relpath(__file__)}:" in text and "in test_an_error_says_where" in text
