"""Decide after a step whether to save and whether to stop, from the clock, files, signals and metrics.

First rank only.

Ctrl-C, SIGUSR1 and SIGTERM request to finish the step, save and stop. SIGUSR2 requests a save. A handler only sets
a flag, which is read between steps. So a signal never interrupts a step or a save, and a second signal changes
nothing. Only Ctrl-C is different: before the first step, and the second time, it ends the process at once.

``collective.decide_together`` sends the decision to all ranks.
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

from rlhf_mcore.checkpoint.housekeeping import best_rule
from rlhf_mcore.checkpoint.layout import SAVE_REQUEST
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
SAVE_SIGNALS = (signal.SIGUSR2,)
_INTERRUPTED = 128 + signal.SIGINT
# Reasons to save, and their texts.
STEPS, EPOCHS, KEPT, MINUTES, BEST, SIGNAL = "steps", "epochs", "kept", "minutes", "best", "signal"
REQUEST, STOP, DEADLINE, MEASURE, END = "request", "stop", "deadline", "measure", "end"
REASONS = {
    STEPS: "save_steps",
    EPOCHS: "save_epochs",
    KEPT: "checkpoint.keep",
    MINUTES: "save_minutes",
    BEST: "the best so far",
    SIGNAL: "requested by SIGUSR2 or an alarm",
    REQUEST: "requested by the file SAVE",
    STOP: "stop requested",
    DEADLINE: "the time limit is near",
    MEASURE: "to measure the duration of a save",
    END: "the last step",
}
MARGIN = 1.25  # factor on the expected time of a step and a save
WINDOW = 100  # number of recent measurements to keep
OUTLIER = 10.0  # a time above this multiple of the second longest is an outlier: the machine was paused


class SignalRequests:
    """Requests from signals to this process. ``stop_requested`` stays set; a save request is consumed once.

    Args:
        acknowledge: called inside a handler with a text for the user.
        begun: called at the start of the first step.
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
        """Handle the signals while the block runs. Main thread only. Earlier handlers are restored afterwards."""
        handlers = dict.fromkeys(STOP_SIGNALS, self._stop) | dict.fromkeys(SAVE_SIGNALS, self._save)
        handlers[signal.SIGINT] = self._interrupt
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # The launcher may have blocked some signals until now.
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        try:
            yield self
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def begin(self) -> None:
        """Note that the first step begins. From now on there is state to save."""
        self._training = True
        self._begun()

    def request_save(self) -> None:
        """Request a checkpoint after this step."""
        self._save_requested = True

    def request_stop(self) -> None:
        """Request to save and stop the run after this step."""
        self.stop_requested = True

    def take_save(self) -> bool:
        """Return whether a save was requested since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        # torchrun sends SIGTERM to all ranks after one has failed; then no rank finishes its step or saves.
        if number != signal.SIGTERM and not self.stop_requested:
            self._acknowledge("stop requested: the run finishes and saves this step, then ends")
        self.stop_requested = True

    def _save(self, _number: int, _frame: FrameType | None) -> None:
        self._acknowledge("save requested: a checkpoint is saved after this step")
        self._save_requested = True

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if not self._training or self.stop_requested:
            os._exit(_INTERRUPTED)
        self._acknowledge(
            "Ctrl-C: the run finishes and saves this step, then ends; press Ctrl-C again to end now without saving"
        )
        self.stop_requested = True


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision after a step.

    ``best``: this checkpoint is the best so far. ``stop``: stop the run, to be resumed later.
    """

    reasons: tuple[str, ...] = ()
    best: bool = False
    stop: bool = False

    @property
    def save(self) -> bool:
        """Return whether a checkpoint is due."""
        return bool(self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decision:
        """Build a decision from the values of ``to_json``."""
        return cls(tuple(value["reasons"]), value["best"], value["stop"])


@dataclass(slots=True)
class Expected:
    """An expected duration: the longest of the last ``WINDOW`` times, unless that time is an outlier.

    ``recent`` contains the times in seconds, oldest first.
    """

    recent: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Return the expected duration, or None before the first measurement."""
        longest = sorted(self.recent)[-2:]
        if len(longest) == 2 and longest[1] > OUTLIER * longest[0]:
            return longest[0]
        return longest[-1] if longest else None

    def add(self, seconds: float) -> None:
        """Add a measurement."""
        self.recent = [*self.recent, seconds][-WINDOW:]

    @classmethod
    def from_json(cls, value: list[float] | float | None) -> Expected:
        """Read the value from a checkpoint: recent times, or the single expected time that earlier versions wrote."""
        if value is None:
            return cls()
        return cls(list(value) if isinstance(value, list) else [value])


@dataclass(slots=True)
class Triggers:
    """Decide from the time of the last save, the best metric, and the durations of steps and saves. First rank only.

    Args:
        config: the group ``checkpoint``.
        num_steps: the run's last step, which is always saved.
        run: the run directory. A file ``SAVE`` in it requests a save.
        deadline: the end of the job, as a time of ``clock``.
        clock: returns seconds of a monotonic clock.
        num_epochs: returns the passes over the training data so far.
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
    _mark: float = 0.0  # start of the current step
    _last_save: float = 0.0
    _saved_step: int | None = None
    _epoch_mark: int = 0  # number of multiples of save_epochs that have passed
    _earlier_best: tuple[float | None, int | None] = (None, None)
    _request: int | None = None  # modification time of the observed SAVE file, in ns

    def begin(self) -> None:
        """Start the clocks at the beginning of the first step."""
        self._started = self._mark = self._last_save = self.clock()
        self._epoch_mark = self._count_epochs()

    def decide(
        self, step: int, metrics: Mapping[str, float], *, save_requested: bool = False, stop_requested: bool = False
    ) -> Decision:
        """Decide what to do after ``step``.

        Args:
            step: the step that was just finished.
            metrics: evaluation metrics at this step, or empty.
            save_requested: a signal has requested a save.
            stop_requested: a signal has requested to stop the run after this step.

        Raises:
            ConfigError: the evaluation does not have the configured metric.
        """
        now = self.clock()
        self.step_s.add(now - self._mark)
        self._mark = now
        earlier, self._epoch_mark = self._epoch_mark, self._count_epochs()
        best = self._update_best(step, metrics)
        reasons = {
            STEPS: self.config.save_steps > 0 and step % self.config.save_steps == 0,
            EPOCHS: self._epoch_mark > earlier,
            KEPT: step in self.config.keep,
            MINUTES: self.config.save_minutes > 0 and now - self._last_save >= 60 * self.config.save_minutes,
            BEST: best,
            SIGNAL: save_requested,
            REQUEST: self._read_request(),
            STOP: stop_requested,
            # Half of the time has passed and the duration of a save is unknown. Measure it while there is time.
            MEASURE: self.deadline is not None
            and self.save_s.seconds is None
            and now >= (self._started + self.deadline) / 2,
            END: step >= self.num_steps,
        }
        late = self._is_late(now, save_is_due=any(reasons.values()))
        reasons[DEADLINE] = late
        stop = (stop_requested or late) and step < self.num_steps
        # A step may be decided twice, but it is saved once.
        if step == self._saved_step:
            return Decision(stop=stop)
        return Decision(tuple(reason for reason, holds in reasons.items() if holds), best, stop)

    def record_save(self, step: int, seconds: float) -> None:
        """Note that a checkpoint of ``step`` was committed. Blocking or in the background, its save took ``seconds``."""
        self.save_s.add(seconds)
        self._saved_step = step
        self._mark = self._last_save = self.clock()
        # Remove the request, unless it was repeated after it was observed.
        path = self.run / SAVE_REQUEST
        with suppress(FileNotFoundError):
            if self._request is not None and path.stat().st_mtime_ns == self._request:
                path.unlink()
        self._request = None

    def not_saved(self, decision: Decision) -> None:
        """Note that the save of ``decision`` has failed and the run continues without it."""
        self._mark = self.clock()
        if decision.best:
            self.best_value, self.best_step = self._earlier_best

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain JSON.

        The current save counts as done, because it stores this state.
        """
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

    def _count_epochs(self) -> int:
        every = self.config.save_epochs
        return math.floor(self.num_epochs() / every + 1e-9) if every else 0

    def _update_best(self, step: int, metrics: Mapping[str, float]) -> bool:
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
        """Return whether one more step and save, after a save that is due now, would miss the deadline."""
        if self.deadline is None:
            return False
        num_saves = 2 if save_is_due else 1
        needed = (self.step_s.seconds or 0.0) + num_saves * (self.save_s.seconds or 0.0)
        return now + MARGIN * needed >= self.deadline

    def _read_request(self) -> bool:
        try:
            self._request = (self.run / SAVE_REQUEST).stat().st_mtime_ns
        except FileNotFoundError:
            self._request = None
        return self._request is not None
