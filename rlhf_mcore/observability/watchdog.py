"""Ends a process that makes no progress, and shows where it hangs."""

from __future__ import annotations

import faulthandler
import sys
from types import TracebackType
from typing import TextIO

from rlhf_mcore.observability import rank_file


class Watchdog:
    """Ends a run if neither :meth:`progress` nor :meth:`beat` is called in time.

    Under our own commands, the command ends the run, using the files of all ranks. Under the user's own torchrun, this
    process prints the stacks of all its threads and exits with code 1. That timer runs in a thread that needs no Python lock
    (``faulthandler``), so it also detects a held GIL or an endless loop in a library. A process has one watchdog at a time.

    Args:
        seconds: maximum time without progress; 0 disables the watchdog.
        file: target for stacks.
    """

    def __init__(self, seconds: int, file: TextIO | None = None):
        self._seconds, self._file = seconds, file or sys.stderr
        self._is_watched = rank_file.is_read()
        self._armed = self._counts = False

    def __enter__(self) -> Watchdog:
        self._armed = True
        self.progress("start")
        return self

    def progress(self, phase: str) -> None:
        """Report the start of a phase, and restart the timer. Outside a ``with`` block, do nothing."""
        if not self._seconds or not self._armed:
            return
        if self._is_watched:
            if not self._counts:
                rank_file.watch(self._seconds)
            rank_file.note_phase(phase)
        else:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
        self._counts = True

    def beat(self) -> None:
        """Report progress within a phase, and restart the timer."""
        if not self._counts:
            return
        if self._is_watched:
            rank_file.beat()
        else:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def pause(self) -> None:
        """Stop the timer until the next :meth:`progress`, because this process waits for others."""
        self._counts = False
        if self._is_watched:
            rank_file.watch(0)
        else:
            faulthandler.cancel_dump_traceback_later()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        self.pause()
