"""A tracker in a thread of its own, which can neither stop a run nor keep it waiting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import find_trackers
from rlhf_mcore.config.show import without_secrets

if TYPE_CHECKING:
    from rlhf_mcore.observability.trackers import TrackedRun
    from rlhf_mcore.protocols import Tracker

MAX_WAITING = 10_000  # steps that a slow tracker may be behind
HANGS_S = 120.0  # a tracker that takes longer for one step hangs
CLOSE_S = 30.0  # that trackers get to bring the last steps away at the end


class BackgroundTracker:
    """Gives a tracker its metrics in a thread. An exception or a hang of it becomes one warning, and the run continues without it."""

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
        self._given = self._done = 0  # steps
        self._since = time.monotonic()  # the thread has been busy with one thing
        self._begin: Callable[[TrackedRun], Tracker] | None = None
        try:  # here, for two threads that import the same packages may find halves of them
            self._begin = find_trackers()[name].load()
        except Exception as error:
            self._give_up(error)
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Returns at once. What is no finite number is left out."""
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
        """Wait for the last steps to be brought away, but not for long. A second call does nothing."""
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
        except BaseException as error:  # a library's sys.exit is one
            self._give_up(error)

    def _give_up(self, problem: BaseException | str) -> None:
        """Once: the first problem is told, and nothing is given to the tracker any more."""
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
