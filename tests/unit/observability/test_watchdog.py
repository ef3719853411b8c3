"""Test the watchdog's use of faulthandler's timer. tests/e2e/test_resume.py tests processes that really hang."""

from __future__ import annotations

import faulthandler
from typing import Any

import pytest

from rlhf_mcore.observability import rank_file
from rlhf_mcore.observability.rank_file import Watchdog


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit, file: made.append((seconds, exit)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: made.append("cancel"))
    return made


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the records for the file of a rank that our command started."""
    found: list[object] = []
    monkeypatch.setattr(rank_file, "is_read", lambda: True)
    monkeypatch.setattr(rank_file, "watch", found.append)
    monkeypatch.setattr(rank_file, "note_phase", found.append)
    monkeypatch.setattr(rank_file, "beat", lambda: found.append("beat"))
    return found


def test_progress_sets_the_clock_anew_and_the_end_stops_it(calls: list[Any]) -> None:
    with Watchdog(30) as watchdog:
        watchdog.progress("update")
    watchdog.progress("update")
    assert calls == [(30, True), (30, True), "cancel"]


def test_progress_within_a_phase_sets_the_clock_anew_unless_it_is_paused(calls: list[Any]) -> None:
    with Watchdog(30) as watchdog:
        watchdog.beat()
        watchdog.pause()
        watchdog.beat()
    assert calls == [(30, True), (30, True), "cancel", "cancel"]


def test_zero_switches_it_off(calls: list[Any]) -> None:
    with Watchdog(0) as watchdog:
        watchdog.progress("update")
    assert calls == ["cancel"]


def test_the_launcher_is_told_and_no_clock_of_our_own_blames_this_rank(calls: list[Any], records: list[object]) -> None:
    with Watchdog(30) as watchdog:
        watchdog.progress("update")
        watchdog.beat()
        watchdog.pause()
        watchdog.progress("generate")
    assert records == [30, "start", "update", "beat", 0, 30, "generate", 0]
    assert calls == []
