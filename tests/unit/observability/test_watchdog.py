"""The clock of faulthandler as the watchdog sets it; a process that really stands still is in tests/e2e/test_resume.py."""

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


def test_progress_sets_the_clock_anew_and_the_end_stops_it(calls: list[Any]) -> None:
    with Watchdog(30) as watchdog:
        watchdog.progress()
    watchdog.progress()
    assert calls == [(30, True), (30, True), "cancel"]


def test_zero_switches_it_off(calls: list[Any]) -> None:
    with Watchdog(0) as watchdog:
        watchdog.progress()
    assert calls == ["cancel"]
