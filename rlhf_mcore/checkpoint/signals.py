"""What signals ask of a run: SIGUSR1 and SIGTERM to finish the step, save and end; SIGUSR2 to save.

A handler only sets a flag, which is read between steps. So a signal never cuts a step or a save, and a second one changes nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR2,)


class SignalRequests:
    """The requests that have come to this process. ``stop_requested`` stays; a request to save is taken once."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._save_requested = False

    @contextmanager
    def listening(self) -> Iterator[SignalRequests]:
        """Take the signals while the block runs. Main thread only; earlier handlers come back afterwards."""
        handlers = dict.fromkeys(STOP_SIGNALS, self._stop) | dict.fromkeys(SAVE_SIGNALS, self._save)
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher may have held some back until now.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        try:
            yield self
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def take_save(self) -> bool:
        """Whether a save was asked for since this was called last."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self._save_requested = True
