"""Whether to save after a step, and whether to stop: decided by the first rank, from the clock, files, signals and metrics.

Signals: Ctrl-C, SIGUSR1 and SIGTERM ask to finish the step, save and end; SIGUSR2 to save. A handler only sets a flag, which is read
between steps. So a signal never cuts a step or a save, and a second one changes nothing. Ctrl-C alone is for impatient people too:
before the first step, and the second time, it ends the process at once.

The decision is an object of plain values; ``collective.decide_together`` tells it to all ranks.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf_mcore.checkpoint.layout import SAVE_REQUEST
from rlhf_mcore.checkpoint.links import best_rule
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR2,)
_INTERRUPTED = 128 + signal.SIGINT
# Reasons to save, and how they are shown.
STEPS, EPOCHS, KEPT, MINUTES, BEST, SIGNAL, REQUEST, STOP, DEADLINE, MEASURE, END = (
    "steps",
    "epochs",
    "kept",
    "minutes",
    "best",
    "signal",
    "request",
    "stop",
    "deadline",
    "measure",
    "end",
)
REASONS = {
    STEPS: "save_steps",
    EPOCHS: "save_epochs",
    KEPT: "checkpoint.keep",
    MINUTES: "save_minutes",
    BEST: "the best so far",
    SIGNAL: "asked by SIGUSR2 or an alarm",
    REQUEST: "asked by the file SAVE",
    STOP: "asked to stop",
    DEADLINE: "the time limit is near",
    MEASURE: "to learn how long a save takes",
    END: "the last step",
}
MARGIN = 1.25  # times what a step and a save are expected to take
WINDOW = 100  # measurements that are remembered
OUTLIER = 10.0  # times the second longest: a machine that stood still, not a time to expect again


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

    def request_save(self) -> None:
        """A checkpoint is wanted after this step."""
        self._save_requested = True

    def request_stop(self) -> None:
        """The run ends after this step, saved."""
        self.stop_requested = True

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


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do after a step. ``best``: the checkpoint is the best so far; ``stop``: end the run, to be started again."""

    reasons: tuple[str, ...] = ()
    best: bool = False
    stop: bool = False

    @property
    def save(self) -> bool:
        """Whether a checkpoint is due."""
        return bool(self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decision:
        """What ``to_json`` made, after its travels."""
        return cls(tuple(value["reasons"]), value["best"], value["stop"])


@dataclass(slots=True)
class Expected:
    """How long something takes: the longest of the last ``WINDOW`` times, unless that one stands alone."""

    recent: list[float] = field(default_factory=list)  # seconds, oldest first

    @property
    def seconds(self) -> float | None:
        """The time to reckon with, None before the first measurement."""
        longest = sorted(self.recent)[-2:]
        if len(longest) == 2 and longest[1] > OUTLIER * longest[0]:
            return longest[0]
        return longest[-1] if longest else None

    def measured(self, seconds: float) -> None:
        """Learn from one more time."""
        self.recent = [*self.recent, seconds][-WINDOW:]

    @classmethod
    def from_json(cls, value: list[float] | float | None) -> Expected:
        """What a checkpoint holds: the recent times, or the single expected time that earlier versions wrote."""
        if value is None:
            return cls()
        return cls(list(value) if isinstance(value, list) else [value])


@dataclass(slots=True)
class Triggers:
    """Knows when the last save was, how good the best model is, and how long steps and saves take. First rank only.

    Args:
        config: of ``checkpoint``.
        num_steps: the run's last step, which is always saved.
        run: the run directory, where a file ``SAVE`` asks for a save.
        deadline: when the job will be ended, by ``clock``.
        clock: seconds of a clock that nobody sets.
        num_epochs: how often the training data has been gone through.
    """

    config: CheckpointConfig
    num_steps: int
    run: Path
    deadline: float | None = None
    clock: Callable[[], float] = time.monotonic
    num_epochs: Callable[[], float] = lambda: 0.0
    best_value: float | None = None
    best_step: int | None = None
    step_s: Expected = field(default_factory=Expected)
    save_s: Expected = field(default_factory=Expected)
    _started: float = 0.0
    _mark: float = 0.0  # since when the step is running
    _last_save: float = 0.0
    _saved_step: int | None = None
    _epoch_mark: int = 0  # multiples of save_epochs that have passed
    _earlier_best: tuple[float | None, int | None] = (None, None)
    _request: int | None = None  # modification time of the SAVE file that was seen, ns

    def begin(self) -> None:
        """The first step begins: clocks start here."""
        self._started = self._mark = self._last_save = self.clock()
        self._epoch_mark = self._epochs_passed()

    def decide(
        self, step: int, metrics: Mapping[str, float], *, save_requested: bool = False, stop_requested: bool = False
    ) -> Decision:
        """What to do after ``step``.

        Args:
            step: the step that was just finished.
            metrics: of the evaluation at this step, empty if there was none.
            save_requested: a signal has asked for a save.
            stop_requested: a signal has asked to end the run after this step.

        Raises:
            ConfigError: the evaluation has no metric of the name that was configured.
        """
        now = self.clock()
        self.step_s.measured(now - self._mark)
        self._mark = now
        earlier, self._epoch_mark = self._epoch_mark, self._epochs_passed()
        best = self._is_best(step, metrics)
        reasons = {
            STEPS: self.config.save_steps > 0 and step % self.config.save_steps == 0,
            EPOCHS: self._epoch_mark > earlier,
            KEPT: step in self.config.keep,
            MINUTES: self.config.save_minutes > 0 and now - self._last_save >= 60 * self.config.save_minutes,
            BEST: best,
            SIGNAL: save_requested,
            REQUEST: self._is_requested(),
            STOP: stop_requested,
            # Half of the time is gone and nobody knows how long a save takes: find out while there is time.
            MEASURE: self.deadline is not None
            and self.save_s.seconds is None
            and now >= (self._started + self.deadline) / 2,
            END: step >= self.num_steps,
        }
        late = self._is_late(now, save_is_due=any(reasons.values()))
        reasons[DEADLINE] = late
        stop = (stop_requested or late) and step < self.num_steps
        if step == self._saved_step:  # asked once more about a step that is on the disk already
            return Decision(stop=stop)
        return Decision(tuple(reason for reason, holds in reasons.items() if holds), best, stop)

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint of ``step`` has been committed; it kept the run waiting, or was being written, for so many seconds."""
        self.save_s.measured(seconds)
        self._saved_step = step
        self._mark = self._last_save = self.clock()
        # The request is served, unless it was made again since it was seen.
        path = self.run / SAVE_REQUEST
        with suppress(FileNotFoundError):
            if self._request is not None and path.stat().st_mtime_ns == self._request:
                path.unlink()
        self._request = None

    def not_saved(self, decision: Decision) -> None:
        """The save that was decided on has failed, and the run continues without it."""
        self._mark = self.clock()
        if decision.best:
            self.best_value, self.best_step = self._earlier_best

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from, as plain JSON. A save that was decided on counts as done: it stores this."""
        return {
            "best_value": self.best_value,
            "best_step": self.best_step,
            "step_s": self.step_s.recent,
            "save_s": self.save_s.recent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        assert state.keys() == self.state_dict().keys(), f"unknown or missing keys in {sorted(state)}"
        self.best_value, self.best_step = state["best_value"], state["best_step"]
        self.step_s, self.save_s = Expected.from_json(state["step_s"]), Expected.from_json(state["save_s"])

    def _epochs_passed(self) -> int:
        every = self.config.save_epochs
        return math.floor(self.num_epochs() / every + 1e-9) if every else 0

    def _is_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        rule = best_rule(self.config)
        if rule is None or not metrics:
            return False
        if rule.metric not in metrics:
            raise ConfigError(
                f"checkpoint.metric_for_best_model={rule.metric!r} is not among the metrics of the evaluation; "
                f"choose one of: {', '.join(sorted(metrics))}"
            )
        if not rule.improves(metrics[rule.metric], self.best_value):
            return False
        self._earlier_best = (self.best_value, self.best_step)
        self.best_value, self.best_step = metrics[rule.metric], step
        return True

    def _is_late(self, now: float, *, save_is_due: bool) -> bool:
        """Whether another step and a save, after the one that is due now, would not fit before the deadline."""
        if self.deadline is None:
            return False
        num_saves = 2 if save_is_due else 1
        needed = (self.step_s.seconds or 0.0) + num_saves * (self.save_s.seconds or 0.0)
        return now + MARGIN * needed >= self.deadline

    def _is_requested(self) -> bool:
        try:
            self._request = (self.run / SAVE_REQUEST).stat().st_mtime_ns
        except FileNotFoundError:
            self._request = None
        return self._request is not None
