"""What ranks tell the process that started them, and whom it blames when they stand still."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.rank_reports import CONSEQUENCE, FAILURE, USER, VARIABLE, Reporter
from rlhf_mcore.cli.report_listener import RankReports
from rlhf_mcore.cli.torchrun import last_lines
from rlhf_mcore.config.errors import ConfigError


def pair(*ranks: int, gone: tuple[int, ...] = ()) -> tuple[RankReports, list[Reporter]]:
    """A listener, and reporters of ranks that have told that they are there."""
    reports = RankReports(has_ended=lambda pid: pid in gone)
    made = [Reporter({**reports.environment, "RANK": str(rank)}) for rank in ranks]
    for rank, reporter in zip(ranks, made, strict=True):
        reporter.announce_process(1000 + rank, rank)
    reports.read(1.0)
    return reports, made


def seconds(reports: RankReports, count: int, alive: tuple[int, ...]) -> tuple[str, list[int]] | None:
    """Let time go by, in which some ranks tell that they are alive. Returns the first complaint."""
    for _ in range(count):
        for rank in alive:
            reports.ranks[rank].since_alive_s = 0.0
        if (problem := reports.tick(1.0)) is not None:
            return problem
    return None


def test_a_rank_that_trains_ends_or_fails_is_heard() -> None:
    reports, (first, second) = pair(0, 1)
    assert not reports.training and reports.unfinished() == [0, 1]
    first.training()
    first.phase("update")
    first.done()
    second.failed(USER, "a mistake")
    reports.read(1.0)
    assert reports.training and reports.unfinished() == [1]
    assert (reports.ranks[0].phase, reports.failures[0].rank, reports.failures[0].text) == ("update", 1, "a mistake")


def test_the_longest_report_is_heard_and_one_that_comes_while_another_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, (first,) = pair(0)
    first.failed(USER, "\U0001f600" * 50_000)  # 12 bytes each in JSON
    take = reports._take

    def interrupted(number: int, message: Mapping[str, Any]) -> None:
        reports.read()  # as the handler of Ctrl-C does on the thread that is reading
        take(number, message)

    monkeypatch.setattr(reports, "_take", interrupted)
    reader = threading.Thread(target=reports.read, args=(1.0,), daemon=True)
    reader.start()
    reader.join(10.0)
    assert not reader.is_alive() and set(reports.failures[0].text) == {"\U0001f600"}


def test_the_end_of_a_log_is_shown_without_commands_to_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(b"x" * 2**20 + b"\n" + b"line\n" * 30 + b"\x1b[2Jred\xff\n" + b"y" * 900)
    found = last_lines(log)
    assert found == [*["    line"] * 18, "     [2Jred\N{REPLACEMENT CHARACTER}", f"    {'y' * 200}"]
    assert last_lines(tmp_path / "absent") == []


def test_an_error_is_told_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        raise ValueError("lost")
    except ValueError as error:
        assert exit_codes.cause(error).startswith(f"ValueError: lost ({__file__}:")


def test_others_are_not_heard_and_nobody_is_told_without_a_listener() -> None:
    reports, _ = pair(0)
    stranger = Reporter({VARIABLE: "wrong " + reports.environment[VARIABLE].split()[1], "RANK": "0"})
    stranger.done()
    reports.read(0.5)
    assert reports.unfinished() == [0]
    alone = Reporter({})
    assert not alone.is_heard
    alone.done()


def test_fault_14_the_stopped_rank_is_blamed_and_not_the_one_that_waits_for_it() -> None:
    reports, both = pair(0, 1)
    for reporter in both:
        reporter.watch(30)
        reporter.phase("generate")
    both[0].phase("exchange")
    reports.read(1.0)
    assert seconds(reports, 29, alive=(0,)) is None
    message, blamed = seconds(reports, 2, alive=(0,)) or ("", [])
    assert blamed == [1]
    assert message.startswith("rank 1 is stopped, or holds Python's lock") and "30 s (trainer.watchdog_s)" in message


def test_the_rank_that_is_behind_is_blamed_when_all_are_alive() -> None:
    reports, both = pair(0, 1)
    for reporter in both:
        reporter.watch(30)
        reporter.phase("score")
    both[1].phase("exchange")
    reports.read(1.0)
    assert (seconds(reports, 31, alive=(0, 1)) or ("", []))[1] == [0]


def test_fault_14_all_ranks_stopped_are_noticed_and_one_that_has_nothing_to_do_is_not() -> None:
    reports, both = pair(0, 1)
    for reporter in both:
        reporter.watch(30)
    reports.read(1.0)
    both[0].watch(0)
    for _ in range(5):
        both[1].phase("generate")
        reports.read(1.0)
        assert seconds(reports, 29, alive=(0, 1)) is None
    both[0].watch(30)
    reports.read(1.0)
    assert (seconds(reports, 31, alive=()) or ("", []))[1] == [0, 1]


def test_a_suspended_job_is_not_ended_when_it_wakes_up() -> None:
    times = iter([0.0, 86_400.0, 86_400.1])
    reports = RankReports(has_ended=lambda pid: False, clock=lambda: next(times))
    heard: list[float] = []
    reports.tick = lambda count: heard.append(count) or ("enough", [0])  # type: ignore[func-returns-value, method-assign]
    done: list[str] = []
    reports.follow(lambda message, ranks: done.append(message))
    while not done:
        pass
    assert heard == [1.0]  # the day that nobody saw is not counted


def test_a_rank_that_left_while_the_others_wait_is_noticed() -> None:
    reports, _ = pair(0, 1, gone=(1001,))
    message, blamed = seconds(reports, 60, alive=(0,)) or ("", [])
    assert blamed == [1] and "ended in the middle of the run" in message


def closed() -> RuntimeError:
    return RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [(ConfigError("seed=x"), USER, 2), (KeyError("x"), FAILURE, 1), (closed(), CONSEQUENCE, 1)],
)
def test_whose_mistake_it_was_is_told_with_the_cause(
    error: Exception, kind: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, _ = pair(0)
    for name, value in {**reports.environment, "RANK": "0", "MY_API_KEY": "hunter2-hunter2"}.items():
        monkeypatch.setenv(name, value)
    try:
        raise error
    except Exception as caught:
        assert exit_codes.report(caught) == code
    reports.read(1.0)
    assert (reports.failures[0].kind, str(error) in reports.failures[0].text) == (kind, True)
    assert ("Traceback" in capsys.readouterr().err) is (kind != USER)


def test_an_error_says_where_it_was_raised_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-hunter2")
    reports, _ = pair(0)
    monkeypatch.setenv(VARIABLE, reports.environment[VARIABLE])
    try:
        raise ValueError("no access with hunter2-hunter2 at https://user:word@host/")
    except ValueError as error:
        exit_codes.report(error)
    reports.read(1.0)
    text = reports.failures[0].text
    assert text.startswith("ValueError: no access with <redacted: MY_API_KEY> at https://<redacted>@host/")
    assert f"({os.path.relpath(__file__)}:" in text and "in test_an_error_says_where" in text
