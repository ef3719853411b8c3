"""Reports from a rank to the process that started it, and the end of a run that makes no progress.

Under our own commands, a rank writes phases, signs of life, the first step, an error and the end to one JSON object in memory.
:class:`RankFiles` reads the objects of all ranks. Under the user's own torchrun, only an error is written, to torchrun's file for
it, as ``torch.distributed.elastic.multiprocessing.errors.record`` does.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import write_atomically

VARIABLE = "RLHF_MCORE_RANK_FILE"  # environment variable of a rank that one of our commands started
OF_TORCHRUN = "TORCHELASTIC_ERROR_FILE"
# The cause of a rank's end: the user's mistake, a failure, or the end of another rank.
USER, FAILURE, CONSEQUENCE = "user", "failure", "consequence"

_MAX_TEXT = 10_000  # characters, with up to 12 bytes each as JSON
_ALIVE_S = 1.0
_POLL_S = 0.5
_SILENT_S = 10.0  # a rank that is silent for longer holds Python's lock
_GONE_S = (
    45.0  # torch ends the others within 30 s of a failure. If it has not, it saw the end of this rank as a success.
)
_lock = threading.RLock()


def is_read() -> bool:
    """Return whether one of our commands started this rank. The command then reports errors and watches the rank's progress."""
    return VARIABLE in os.environ


def note_start() -> None:
    """Report the start of the process. From now on, a thread reports every second that it is alive."""
    number = os.environ.get("RANK", "0")
    rank = int(number) if number.isdecimal() else 0  # the user gets a proper message later
    _update(lambda _: {"rank": rank, "pid": os.getpid(), "phase": "starting", "phases": 0, "progress": 0, "limit_s": 0})
    if is_read():
        threading.Thread(target=_note_life, name="alive", daemon=True).start()


def watch(limit_s: int) -> None:
    """Request that the run ends if no rank starts a phase or beats for ``limit_s`` seconds; 0 excludes this rank."""
    _update(lambda told: {"limit_s": limit_s, "progress": told["progress"] + 1})


def note_phase(name: str) -> None:
    """Report the start of a phase."""
    _update(lambda told: {"phase": name, "phases": told["phases"] + 1, "progress": told["progress"] + 1})


def beat() -> None:
    """Report progress within a phase."""
    _update(lambda told: {"progress": told["progress"] + 1})


def note_training() -> None:
    """Report the start of the first step. From now on there is something to save."""
    _update(lambda _: {"training": True})


def note_done() -> None:
    """Report that the last step is finished and saved."""
    _update(lambda _: {"done": True})


def note_error(kind: str, text: str) -> None:
    """Report the error that ends the rank. ``kind``: USER, FAILURE or CONSEQUENCE."""
    _update(lambda _: {"kind": kind, "message": text[:_MAX_TEXT], "time": time.time()})
    if (path := os.environ.get(OF_TORCHRUN)) and not is_read():
        # Written atomically, because torchrun cannot read half a file.
        with suppress(OSError, ConfigError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), json.dumps({"message": text, "timestamp": int(time.time())}).encode())


def _update(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Update entries of the object. Its size never shrinks."""
    if not is_read():
        return
    # The process that started this rank may be gone. A file without a start entry is not changed.
    with _lock, suppress(OSError, ValueError, KeyError), open(os.environ[VARIABLE], "r+b", buffering=0) as file:
        content = file.read()
        told = json.loads(content)
        told |= change(told)
        file.seek(0)
        file.write(json.dumps(told).encode().ljust(len(content)))


def _note_life() -> None:
    while True:
        time.sleep(_ALIVE_S)
        _update(lambda told: {"alive": told.get("alive", 0) + 1})


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
        self._is_watched = is_read()
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
                watch(self._seconds)
            note_phase(phase)
        else:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)
        self._counts = True

    def beat(self) -> None:
        """Report progress within a phase, and restart the timer."""
        if not self._counts:
            return
        if self._is_watched:
            beat()
        else:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def pause(self) -> None:
        """Stop the timer until the next :meth:`progress`, because this process waits for others."""
        self._counts = False
        if self._is_watched:
            watch(0)
        else:
            faulthandler.cancel_dump_traceback_later()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._armed = False
        self.pause()


@dataclass(slots=True)
class Standstill:
    """Seconds since a rank last reported something new. Only the time while this process was running counts."""

    progress: int = -1
    alive: int = -1
    since_progress_s: float = 0.0
    since_alive_s: float = 0.0
    gone_s: float = 0.0

    def count(self, told: dict[str, Any], seconds: float, is_gone: bool) -> None:
        """Add ``seconds`` to each counter, or reset the counter to 0 if the rank has reported something new."""
        alive = told.get("alive", 0)
        self.since_alive_s = self.since_alive_s + seconds if alive == self.alive else 0.0
        self.since_progress_s = self.since_progress_s + seconds if told["progress"] == self.progress else 0.0
        self.gone_s = self.gone_s + seconds if is_gone else 0.0
        self.progress, self.alive = told["progress"], alive


class RankFiles:
    """The report files of the ranks of this node. They are in memory, so a kill leaves no files and a full disk does not matter.

    Args:
        has_ended: returns whether a process has ended.
        clock: monotonic seconds.
    """

    def __init__(self, has_ended: Callable[[int], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._has_ended, self._clock = has_ended, clock
        self._files: dict[int, int] = {}
        self._still: dict[int, Standstill] = {}

    def make(self, local_rank: int) -> str:
        """Create the file of a rank, and return its path."""
        descriptor = os.memfd_create(f"rank-{local_rank}")
        os.write(descriptor, json.dumps({"local_rank": local_rank}).encode())
        self._files[local_rank] = descriptor
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the reports of the ranks that have started, by global rank."""
        found = {}
        for descriptor in self._files.values():
            with suppress(ValueError):  # the rank is writing at this moment; the next read will succeed
                told = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
                if "rank" in told:
                    found[int(told["rank"])] = told
        return found

    def is_training(self) -> bool:
        """Return whether a rank has started its first step."""
        return any(told.get("training") for told in self.read().values())

    def watch(self, stalled: Callable[[str, list[int]], None]) -> None:
        """Watch the ranks in a thread, and call ``stalled(message, ranks to blame)`` once if the run makes no progress."""

        def look() -> None:
            last = self._clock()
            while True:
                time.sleep(_POLL_S)
                now = self._clock()
                # The whole job may have been suspended in the meantime. That time does not count.
                problem = self.count(min(now - last, 2 * _POLL_S))
                last = now
                if problem is not None:
                    stalled(*problem)
                    return

        threading.Thread(target=look, name="watch ranks", daemon=True).start()

    def count(self, seconds: float) -> tuple[str, list[int]] | None:
        """Count ``seconds`` for every rank. Returns a message and the ranks to blame if the run makes no progress, else None."""
        ranks = self.read()
        for number, told in ranks.items():
            self._still.setdefault(number, Standstill()).count(told, seconds, self._has_ended(told["pid"]))
        living = {number: told for number, told in ranks.items() if not self._still[number].gone_s}
        ended = [n for n, told in ranks.items() if self._still[n].gone_s > _GONE_S and not told.get("done")]
        if ended and living and not any("kind" in told for told in ranks.values()):
            return f"{_name_ranks(ended)} ended in the middle of the run", ended
        watched = {number: told for number, told in living.items() if told["limit_s"]}
        # A single rank may be idle for a while. If the others need it, they stop too, so all watched ranks must be stalled.
        if not watched or any(self._still[n].since_progress_s < told["limit_s"] for n, told in watched.items()):
            return None
        return self._blame(watched)

    def _blame(self, ranks: dict[int, dict[str, Any]]) -> tuple[str, list[int]]:
        """Return a message that blames the silent ranks, else the ranks that are furthest behind."""
        limit = f"for {max(told['limit_s'] for told in ranks.values())} s (trainer.watchdog_s)"
        if silent := [number for number in ranks if self._still[number].since_alive_s > _SILENT_S]:
            verbs = "is stopped, or holds" if len(silent) == 1 else "are stopped, or hold"
            return f"{_name_ranks(silent)} {verbs} Python's lock in a library: no progress {limit}", silent
        fewest = min(told["phases"] for told in ranks.values())
        behind = [number for number, told in ranks.items() if told["phases"] == fewest]
        if len(behind) < len(ranks):
            return f"{_name_ranks(behind)} did not finish a phase {limit}, and the others wait", behind
        return f"no rank has started a new phase or sampled a token {limit}", behind


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
