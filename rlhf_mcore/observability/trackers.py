"""Writers for metrics: JSON lines, and trackers, which can neither stop nor delay a run. All implement ``protocols.Tracker``."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import TRACKERS, find_trackers
from rlhf_mcore.config.keys import leaves
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.config.schema.run import wanted_trackers
from rlhf_mcore.observability.files import cut_unfinished_line, full_disk_named, json_line
from rlhf_mcore.observability.run_directory import OTHER_TRACKERS, RunDirectory
from rlhf_mcore.own_files import open_own, own_directory
from rlhf_mcore.redaction import redact, without_secrets

if TYPE_CHECKING:
    from rlhf_mcore.protocols import Tracker


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The data of a run for a tracker.

    ``directory`` is the tracker's own directory inside the run's. ``id`` stays the same after a restart. ``last_step`` is the
    step after which a resumed run continues; None for a new run. ``config`` maps dotted keys to values, without secrets.
    """

    directory: Path
    last_step: int | None = None
    id: str = "0" * 32
    project: str = "rlhf_mcore"
    experiment: str = "default"
    config: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False


def build_trackers(cfg: Config, run: RunDirectory, last_step: int | None, warn: Callable[[str], None]) -> MultiTracker:
    """Build the writer of ``metrics.jsonl`` and the requested trackers, each in its own thread. ``warn`` reports failures."""
    trackers: list[Tracker] = [JsonlTracker(run.metrics_path)]
    config = {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in leaves(redact(to_dict(cfg)))
    }
    for name in wanted_trackers(cfg.logging):
        folder = run.path if name in TRACKERS else own_directory(run.path / OTHER_TRACKERS)
        tracked = TrackedRun(
            folder / name, last_step, run.tracker_run_id(), cfg.project, cfg.experiment, config, cfg.logging.offline
        )
        trackers.append(BackgroundTracker(name, tracked, warn))
    return MultiTracker(trackers)


class JsonlTracker:
    """Appends one JSON object per call, with "step" first. Each line is a single write, so that a reader never sees half a line.

    NaN and infinities are written as null (``files.json_line``). When the file is opened again, an incomplete last line from
    a crash is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        cut_unfinished_line(self._file, path)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            FullDiskError: the line does not fit on the disk.
        """
        assert "step" not in metrics, "pass the step as a separate argument"
        line = json_line({"step": step, **metrics})
        with full_disk_named(self._path, len(line)):
            if os.write(self._file, line) != len(line):  # the incomplete line is removed when the file is opened again
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class MultiTracker:
    """Passes all calls to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close all trackers, even if one fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


MAX_WAITING = 10_000  # maximum number of steps in the queue of a slow tracker
HANGS_S = 120.0  # a tracker that takes longer for one step has failed
CLOSE_S = 30.0  # time for trackers to send the last steps


class BackgroundTracker:
    """Runs a tracker in a thread. If it raises or hangs, the run prints one warning and continues without it."""

    def __init__(
        self,
        name: str,
        run: TrackedRun,
        warn: Callable[[str], None],
        hangs_s: float = HANGS_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._run, self._warn, self._hangs_s, self._close_s = name, run, warn, hangs_s, close_s
        self._waiting: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_WAITING)
        self._given_up = Event()
        self._given = self._done = 0  # numbers of steps
        self._since = time.monotonic()  # start of the thread's current work
        self._begin: Callable[[TrackedRun], Tracker] | None = None
        try:  # in this thread, because concurrent imports in two threads may see incomplete packages
            self._begin = find_trackers()[name].load()
        except Exception as error:
            self._give_up(error)
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Return immediately. Values that are not finite numbers are dropped."""
        if self._given_up.is_set():
            return
        now = time.monotonic()
        if self._given == self._done:
            self._since = now
        elif now - self._since > self._hangs_s:
            self._give_up(f"it has not answered for {self._hangs_s:.0f} s")
            return
        try:
            self._waiting.put_nowait((step, _numbers(metrics)))
            self._given += 1
        except Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def close(self) -> None:
        """Wait a limited time for the last steps to be sent. A second call does nothing."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        end = time.monotonic() + self._close_s
        while self._thread.is_alive() and not self._given_up.is_set() and time.monotonic() < end:
            self._thread.join(0.05)
        if self._thread.is_alive():
            self._give_up(f"it has not finished within {self._close_s:.0f} s")

    def _work(self) -> None:
        try:
            if self._begin is None:
                return
            tracker = self._begin(self._run)
            while (item := self._waiting.get()) is not None and not self._given_up.is_set():
                tracker.log(*item)
                self._done, self._since = self._done + 1, time.monotonic()
            tracker.close()
        except BaseException as error:  # including SystemExit from a library
            self._give_up(error)

    def _give_up(self, problem: BaseException | str) -> None:
        """Report the first problem, once, and pass nothing more to the tracker."""
        if not self._given_up.is_set():
            self._given_up.set()
            first = (str(problem).strip().splitlines() or [""])[0]
            why = without_secrets(first if isinstance(problem, str) else f"{type(problem).__name__}: {first}")[:300]
            self._warn(
                f"warning: the tracker {self._name} gets no more metrics ({why}); the run continues, and metrics.jsonl has them all"
            )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {
        name: float(value) for name, value in plain.items() if isinstance(value, int | float) and math.isfinite(value)
    }
