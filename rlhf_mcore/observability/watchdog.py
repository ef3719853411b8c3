"""Ends a process that makes no progress, saying where it hangs."""

from __future__ import annotations

import faulthandler
import sys
from types import TracebackType
from typing import TextIO


class Watchdog:
    """Prints the stacks of all threads and ends the process with exit code 1 unless :meth:`progress` is called in time.

    The clock runs in a thread that needs no Python lock (``faulthandler``), so a held GIL or an endless loop in a library is
    noticed too. A process has one watchdog at a time.

    Args:
        seconds: without progress; 0 switches it off.
        file: where stacks go.
    """

    def __init__(self, seconds: int, file: TextIO | None = None):
        self._seconds, self._file = seconds, file or sys.stderr
        self._armed = False

    def __enter__(self) -> Watchdog:
        self._armed = True
        self.progress()
        return self

    def progress(self) -> None:
        """Begin to count anew. Outside of a ``with`` block nothing is counted."""
        if self._seconds and self._armed:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        faulthandler.cancel_dump_traceback_later()
