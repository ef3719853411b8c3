"""What signals ask of a run: Ctrl-C, SIGUSR1 and SIGTERM to finish the step, save and end; SIGUSR2 to save.

A handler only sets a flag, which is read between steps. So a signal never cuts a step or a save, and a second one changes nothing.
Ctrl-C alone is for impatient people too: before the first step, and the second time, it ends the process at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR2,)
_INTERRUPTED = 128 + signal.SIGINT


class SignalRequests:
    """The requests that have come to this process. ``stop_requested`` stays; a request to save is taken once.

    Args:
        acknowledge: called inside a handler with what will happen.
        begun: called when the first step begins.
    """

    def __init__(
        self, acknowledge: Callable[[str], None] = lambda text: None, begun: Callable[[], None] = lambda: None
    ) -> None:
        self.stop_requested = False
        self._save_requested = False
        self._training = False
        self._acknowledge, self._begun = acknowledge, begun

    @contextmanager
    def listening(self) -> Iterator[SignalRequests]:
        """Take the signals while the block runs. Main thread only; earlier handlers come back afterwards."""
        handlers = dict.fromkeys(STOP_SIGNALS, self._stop) | dict.fromkeys(SAVE_SIGNALS, self._save)
        handlers[signal.SIGINT] = self._interrupt
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher may have held some back until now.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        try:
            yield self
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def begin(self) -> None:
        """The first step begins: from now on there is something to save."""
        self._training = True
        self._begun()

    def take_save(self) -> bool:
        """Whether a save was asked for since this was called last."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        # torchrun ends the ranks by SIGTERM once one has failed; then nothing is finished or saved.
        if number != signal.SIGTERM and not self.stop_requested:
            self._acknowledge("asked to stop: this step is finished and saved, then the run ends")
        self.stop_requested = True

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self._acknowledge("asked to save: a checkpoint is saved when this step is finished")
        self._save_requested = True

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._training or self.stop_requested:
            os._exit(_INTERRUPTED)
        self._acknowledge(
            "Ctrl-C: this step is finished and saved, then the run ends. Press it again to end at once, without that"
        )
        self.stop_requested = True
