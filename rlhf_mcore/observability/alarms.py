"""Alarms: metrics that leave their bounds, judged after every step on the first rank, and what is done then."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Thread

from rlhf_mcore.config.metric_rules import BAD, MEASURES, RULES, Series
from rlhf_mcore.config.schema import AlarmRuleConfig, AlarmsConfig
from rlhf_mcore.config.show import without_secrets
from rlhf_mcore.observability.files import json_line

SAMPLES = "progress/samples"
EARLY, RECENT = 20, 200  # values of a metric that are remembered: its first and its last ones
QUIET_STEPS = 10  # without trouble in a row, after which the same alarm may be given again
CLOSE_S = 10.0  # for messages that are under way when the run ends


@dataclass(frozen=True, slots=True)
class Alarm:
    """``value`` is what the rule has judged. ``text`` tells it all, on one line."""

    step: int
    name: str
    metric: str
    value: float
    text: str
    actions: tuple[str, ...]


@dataclass(slots=True)
class _Watch:
    """A rule with what it remembers of its metric."""

    name: str
    metric: str
    measure: str
    is_crossed: Callable[[float], bool]
    describe: Callable[[float], str]
    remedy: str
    steps: int
    actions: tuple[str, ...]
    counts: bool = False
    early: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    in_a_row: int = 0
    quiet: int = QUIET_STEPS

    def begins(self, value: float) -> float | None:
        """One more value. Returns what the rule judges where this step begins an alarm."""
        if len(self.early) < EARLY:
            self.early.append(value)
        else:
            self.recent.append(value)
        series = [*self.early, *self.recent]
        measure = MEASURES[self.measure]
        judged = measure.now(Series(series)) if len(series) >= measure.least else None
        if judged is None or not self.is_crossed(judged):
            self.in_a_row, self.quiet = 0, self.quiet + 1
            return None
        self.in_a_row += 1
        if self.quiet < QUIET_STEPS:
            self.quiet = 0
            return None
        if self.in_a_row < self.steps:
            return None
        self.quiet = 0
        return judged


class Alarms:
    """All rules of a run: those of ``cfg``, and the default ones of metrics that these are not about."""

    def __init__(self, cfg: AlarmsConfig) -> None:
        self._actions = tuple(cfg.actions)
        own = [_own(rule, self._actions) for rule in cfg.rules]
        self._watches = own + (_defaults({watch.metric for watch in own}, self._actions) if cfg.defaults else [])
        self._finite = _Watch("", "", "value", bool, str, "", 1, self._actions) if cfg.defaults else None
        self._samples = 0.0

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        """The alarms that a step begins. To be used up, also for steps before a restart."""
        samples = metrics.get(SAMPLES, self._samples) - self._samples
        self._samples += samples
        for watch in self._watches:
            value = metrics.get(watch.metric)
            if value is None or not math.isfinite(value) or (watch.counts and samples <= 0):
                continue
            if (judged := watch.begins(value / samples if watch.counts else value)) is not None:
                text = f"step {step}: alarm: {watch.describe(judged)}: {watch.remedy}"
                yield Alarm(step, watch.name, watch.metric, judged, text, watch.actions)
        # The gradient of an update that was skipped is not finite, which the rule for those tells.
        bad = [name for name, value in metrics.items() if name.endswith("/skipped_updates") and value]
        skipped = {name.replace("skipped_updates", "grad_norm") for name in bad}
        names = sorted(name for name, value in metrics.items() if not math.isfinite(value) and name not in skipped)
        if self._finite is not None and self._finite.begins(float(bool(names))) is not None:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = (
                f"step {step}: alarm: not a finite number: {', '.join(names[:3])}{more}: look at the rollouts of this step; lower the "
                "learning rate"
            )
            yield Alarm(step, "not finite", names[0], metrics[names[0]], text, self._actions)


def _own(rule: AlarmRuleConfig, actions: tuple[str, ...]) -> _Watch:
    above, below = rule.above, rule.below
    bounds = [f"{side} {bound:g}" for side, bound in (("above", above), ("below", below)) if bound is not None]
    of = "" if rule.measure == "value" else f" ({MEASURES[rule.measure].text})"
    return _Watch(
        rule.metric,
        rule.metric,
        rule.measure,
        lambda value: (above is not None and value > above) or (below is not None and value < below),
        lambda value: f"{rule.metric}{of} is {value:.4g}",
        f"the bound of alarms.rules is: {' or '.join(bounds)}",
        rule.steps,
        tuple(rule.actions) if rule.actions is not None else actions,
    )


def _defaults(known: set[str], actions: tuple[str, ...]) -> list[_Watch]:
    """Those of the report's rules that are alarms."""
    return [
        _Watch(
            rule.name,
            rule.metric,
            rule.measure,
            lambda value, rule=rule: rule.judge(value) == BAD,  # type: ignore[misc]
            lambda value, rule=rule: (  # type: ignore[misc]
                f"{rule.name} ({rule.metric}) at {rule.shown(value)}, in trouble from {rule.shown(rule.bad)}"
            ),
            rule.remedy,
            rule.alarm_steps,
            actions,
            rule.counts,
        )
        for rule in RULES
        if rule.alarm_steps and rule.metric not in known
    ]


class AlarmBell:
    """What is done where an alarm is given: ``cfg`` tells where messages go. On the first rank.

    ``note`` shows a line; ``save`` and ``stop`` ask for a checkpoint after the step, and for the end of the run.
    """

    def __init__(
        self,
        cfg: AlarmsConfig,
        run: str,
        note: Callable[[str], None],
        save: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self.alarms = Alarms(cfg)
        self.stopped_by = ""  # the text of the alarm that has ended the run
        self._cfg, self._run, self._note, self._save, self._stop = cfg, run, note, save, stop
        self._failed: set[str] = set()
        self._sending: list[Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def recall(self, metrics: Mapping[str, float]) -> None:
        """A step that was made before a restart: what it has shown is known."""
        for _ in self.alarms.check(0, metrics):
            pass

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the alarms that the step begins."""
        for alarm in self.alarms.check(step, metrics):
            self._note(alarm.text)
            if "save" in alarm.actions:
                self._save()
            if "stop" in alarm.actions:
                self.stopped_by = self.stopped_by or alarm.text
                self._stop()
            for action, send in (("webhook", self._post), ("command", self._call)):
                if action in alarm.actions:
                    content = json_line({"run": self._run, **asdict(alarm)})
                    thread = Thread(target=self._try, args=(action, send, content), name=f"alarm {action}", daemon=True)
                    self._sending = [other for other in self._sending if other.is_alive()] + [thread]
                    thread.start()

    def close(self) -> None:
        """Wait a moment for messages that are under way. A command that takes longer is ended with all that it has started."""
        end = time.monotonic() + CLOSE_S
        for thread in self._sending:
            thread.join(max(end - time.monotonic(), 0.0))
        for process in self._commands:
            if process.poll() is None:
                _end_group(process)

    def _try(self, action: str, send: Callable[[bytes], None], content: bytes) -> None:
        try:
            send(content)
        except Exception as error:
            if action not in self._failed:  # once is enough
                self._failed.add(action)
                secret = self._cfg.webhook or "\0"
                why = without_secrets(str(error)).replace(secret, "<redacted>").splitlines() or [""]
                self._note(
                    f"warning: alarms.{action} did not work ({type(error).__name__}: {why[0][:300]}); the run continues"
                )

    def _post(self, content: bytes) -> None:
        assert self._cfg.webhook is not None
        request = urllib.request.Request(self._cfg.webhook, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._cfg.timeout_s):
            pass

    def _call(self, content: bytes) -> None:
        nothing, program = subprocess.DEVNULL, self._cfg.command[0]  # its arguments may be secrets
        process = subprocess.Popen(
            self._cfg.command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
        self._commands = [other for other in self._commands if other.poll() is None] + [process]
        with process:
            try:
                process.communicate(content, self._cfg.timeout_s)
            except subprocess.TimeoutExpired as late:
                _end_group(process)
                raise subprocess.TimeoutExpired(program, late.timeout) from None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, program)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
