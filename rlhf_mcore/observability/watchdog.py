"""Ends a process that makes no progress, saying where it hangs."""

from __future__ import annotations

import faulthandler
import sys
from types import TracebackType
from typing import Protocol, TextIO


class Watcher(Protocol):
    """Somebody who watches all ranks from outside of them, and can tell which of them stands still."""

    def watch(self, limit_s: int) -> None:
        """End the run from now on when no rank begins a phase for ``limit_s`` seconds; 0: this one does not count."""
        ...

    def phase(self, name: str) -> None:
        """Note that a phase begins."""
        ...


class Watchdog:
    """Ends a run in which :meth:`progress` is not called in time.

    With a ``watcher`` that one does it. Without (under the user's own torchrun) this process prints the stacks of all its threads and
    ends itself with exit code 1. That clock runs in a thread that needs no Python lock (``faulthandler``), so a held GIL or an endless
    loop in a library is noticed too. A process has one watchdog at a time.

    Args:
        seconds: without progress; 0 switches it off.
        file: where stacks go.
        watcher: gets the reports of progress.
    """

    def __init__(self, seconds: int, file: TextIO | None = None, watcher: Watcher | None = None):
        self._seconds, self._file, self._watcher = seconds, file or sys.stderr, watcher
        self._armed = self._counts = False

    def __enter__(self) -> Watchdog:
        self._armed = True
        self.progress("start")
        return self

    def progress(self, phase: str) -> None:
        """Note that a phase begins, and count anew. Outside of a ``with`` block nothing is counted."""
        if not self._seconds or not self._armed:
            return
        if self._watcher is not None:
            if not self._counts:
                self._watcher.watch(self._seconds)
            self._watcher.phase(phase)
        else:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
        self._counts = True

    def pause(self) -> None:
        """Count nothing until the next :meth:`progress`: this process waits for others."""
        self._counts = False
        if self._watcher is not None:
            self._watcher.watch(0)
        else:
            faulthandler.cancel_dump_traceback_later()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        self.pause()
