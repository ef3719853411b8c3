"""The clock of faulthandler as the watchdog sets it; processes that really stand still are in tests/e2e/test_resume.py."""

from __future__ import annotations

import faulthandler
from typing import Any

import pytest

from rlhf_mcore.observability.watchdog import Watchdog


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit, file: made.append((seconds, exit)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: made.append("cancel"))
    return made


class Listener:
    def __init__(self) -> None:
        self.told: list[object] = []

    def watch(self, limit_s: int) -> None:
        self.told.append(limit_s)

    def phase(self, name: str) -> None:
        self.told.append(name)


def test_progress_sets_the_clock_anew_and_the_end_stops_it(calls: list[Any]) -> None:
    with Watchdog(30) as watchdog:
        watchdog.progress("update")
    watchdog.progress("update")
    assert calls == [(30, True), (30, True), "cancel"]


def test_zero_switches_it_off(calls: list[Any]) -> None:
    with Watchdog(0) as watchdog:
        watchdog.progress("update")
    assert calls == ["cancel"]


def test_a_watcher_is_told_and_no_clock_of_our_own_blames_this_rank(calls: list[Any]) -> None:
    listener = Listener()
    with Watchdog(30, watcher=listener) as watchdog:
        watchdog.progress("update")
        watchdog.pause()
        watchdog.progress("generate")
    assert listener.told == [30, "start", "update", 0, 30, "generate", 0]
    assert calls == []
