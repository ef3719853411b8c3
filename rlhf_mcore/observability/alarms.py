"""Alarms for metrics that leave their bounds: checked after every step on the first rank, sent as notes, posts or commands."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from threading import Thread

from rlhf_mcore.config.schema import AlarmRuleConfig, AlarmsConfig
from rlhf_mcore.metrics.rules import BAD, MEASURES, RULES, MetricRule, Series
from rlhf_mcore.observability.files import json_line
from rlhf_mcore.own_processes import kill_group, start
from rlhf_mcore.redaction import without_secrets

MEAN, MIN, MAX, DEVIATION, SAMPLES = "reward/mean", "reward/min", "reward/max", "reward/std", "progress/samples"
# Share of the span of a step's scores. A smaller change of the mean is no jump, however steady the previous steps were.
LEAST_SHARE = 0.05
EARLY, RECENT = 20, 200  # numbers of first and last values of a metric that are kept
QUIET_STEPS = 10  # consecutive healthy steps before the same alarm may be raised again
TIMEOUT_S = 30.0  # for a post or a command
CLOSE_S = 10.0  # for unsent messages when the run ends


@dataclass(frozen=True, slots=True)
class Alarm:
    """``value`` is the judged value. ``text`` is the complete message on one line."""

    step: int
    name: str
    metric: str
    value: float
    text: str
    actions: tuple[str, ...]


@dataclass(slots=True)
class _Streak:
    """Consecutive steps with the same problem. An alarm starts after ``steps`` of them, and again only after healthy steps."""

    steps: int
    in_a_row: int = 0
    quiet: int = QUIET_STEPS

    def starts(self, is_bad: bool) -> bool:
        """Add a step, and return whether an alarm starts with it."""
        if not is_bad:
            self.in_a_row, self.quiet = 0, self.quiet + 1
            return False
        self.in_a_row += 1
        is_new = self.quiet >= QUIET_STEPS
        if is_new and self.in_a_row < self.steps:
            return False
        self.quiet = 0
        return is_new


@dataclass(slots=True)
class _Watch:
    """A rule and the history of its metric. ``trouble`` returns the problem with a measured value, or None."""

    name: str
    metric: str
    measure: str
    trouble: Callable[[float], str | None]
    streak: _Streak
    actions: tuple[str, ...]
    counts: bool = False
    early: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def alarm(self, step: int, value: float) -> Alarm | None:
        """Add a value, and return the alarm that starts with it, or None."""
        (self.early if len(self.early) < EARLY else self.recent).append(value)
        series = [*self.early, *self.recent]
        measure = MEASURES[self.measure]
        judged = measure.now(Series(series)) if len(series) >= measure.least else 0.0
        trouble = self.trouble(judged) if len(series) >= measure.least else None
        if not self.streak.starts(trouble is not None):
            return None
        return Alarm(step, self.name, self.metric, judged, f"step {step}: alarm: {trouble}", self.actions)


class Alarms:
    """All rules of a run: the rules of ``cfg``, and the default rules for other metrics."""

    def __init__(self, cfg: AlarmsConfig) -> None:
        self._actions = tuple(cfg.actions)
        self._watches = [_own(rule, self._actions) for rule in cfg.rules]
        self._finite = _Streak(1) if cfg.defaults else None
        if cfg.defaults:
            known = {watch.metric for watch in self._watches}
            defaults = [rule for rule in RULES if rule.alarm_steps and rule.metric not in known]
            self._watches += [_default(rule, self._actions) for rule in defaults]
        self._samples = 0.0

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        """Yield the alarms that start in a step. Exhaust the iterator in every step, including steps before a restart."""
        samples = metrics.get(SAMPLES, self._samples) - self._samples
        self._samples += samples
        for watch in self._watches:
            value = metrics.get(watch.metric)
            if value is None or not math.isfinite(value) or (watch.counts and samples <= 0):
                continue
            if (alarm := watch.alarm(step, value / samples if watch.counts else value)) is not None:
                yield alarm
        # The gradient of a skipped update is not finite; the rule for skipped updates reports it.
        bad = [name for name, value in metrics.items() if name.endswith("/skipped_updates") and value]
        skipped = {name.replace("skipped_updates", "grad_norm") for name in bad}
        names = sorted(name for name, value in metrics.items() if not math.isfinite(value) and name not in skipped)
        if self._finite is not None and self._finite.starts(bool(names)):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = (
                f"step {step}: alarm: not a finite number: {', '.join(names[:3])}{more}: check the rollouts of this step; lower the "
                "learning rate"
            )
            yield Alarm(step, "not finite", names[0], metrics[names[0]], text, self._actions)


def _own(rule: AlarmRuleConfig, actions: tuple[str, ...]) -> _Watch:
    """Build the watch for a rule of ``alarms.rules``."""
    above, below = rule.above, rule.below
    bounds = [f"{side} {bound:g}" for side, bound in (("above", above), ("below", below)) if bound is not None]
    of = "" if rule.measure == "value" else f" ({MEASURES[rule.measure].text})"

    def trouble(value: float) -> str | None:
        if (above is None or value <= above) and (below is None or value >= below):
            return None
        return f"{rule.metric}{of} is {value:.4g}, {' or '.join(bounds)} (alarms.rules)"

    own_actions = tuple(rule.actions) if rule.actions is not None else actions
    return _Watch(rule.metric, rule.metric, rule.measure, trouble, _Streak(rule.steps), own_actions)


def _default(rule: MetricRule, actions: tuple[str, ...]) -> _Watch:
    """Build the watch for one of the report's rules."""

    def trouble(value: float) -> str | None:
        if rule.judge(value) != BAD:
            return None
        return f"{rule.name} ({rule.metric}) at {rule.shown(value)}, bad from {rule.shown(rule.bad)}: {rule.remedy}"

    streak = _Streak(rule.alarm_steps)
    return _Watch(rule.name, rule.metric, rule.measure, trouble, streak, actions, rule.counts)


class AlarmBell:
    """Performs the actions for alarms, on the first rank. ``cfg`` defines the receivers of messages.

    ``note`` prints a message. ``save`` requests a checkpoint after the step, and ``stop`` the end of the run. Posts and commands run
    in threads. Only the first failed post and the first failed command are reported.
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
        self.stopped_by = ""  # text of the alarm that has ended the run
        self._cfg, self._run, self._note, self._save, self._stop = cfg, run, note, save, stop
        self._failed: set[str] = set()
        self._sending: list[Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def recall(self, metrics: Mapping[str, float]) -> None:
        """Process a step from before a restart, without raising its alarms again."""
        for _ in self.alarms.check(0, metrics):
            pass

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise the alarms that start in the step."""
        for alarm in self.alarms.check(step, metrics):
            self._note(alarm.text)
            if "save" in alarm.actions:
                self._save()
            if "stop" in alarm.actions:
                self.stopped_by = self.stopped_by or alarm.text
                self._stop()
            content = json_line({"run": self._run, **asdict(alarm)})
            if "webhook" in alarm.actions:
                self._start("webhook", self._post, content)
            if "command" in alarm.actions:
                self._start("command", self._call, content)

    def close(self) -> None:
        """Wait briefly for messages that are being sent. A command that takes longer is killed with all its child processes."""
        end = time.monotonic() + CLOSE_S
        for thread in self._sending:
            thread.join(max(end - time.monotonic(), 0.0))
        for process in self._commands:
            if process.poll() is None:
                kill_group(process)

    def _start(self, action: str, send: Callable[[bytes], None], content: bytes) -> None:
        thread = Thread(target=self._try, args=(action, send, content), name=f"alarm {action}", daemon=True)
        self._sending = [other for other in self._sending if other.is_alive()] + [thread]
        thread.start()

    def _try(self, action: str, send: Callable[[bytes], None], content: bytes) -> None:
        try:
            send(content)
        except Exception as error:
            if action not in self._failed:
                self._failed.add(action)
                secret = self._cfg.webhook or "\0"
                why = without_secrets(str(error)).replace(secret, "<redacted>").splitlines() or [""]
                self._note(
                    f"warning: alarms.{action} failed ({type(error).__name__}: {why[0][:300]}); the run continues"
                )

    def _post(self, content: bytes) -> None:
        assert self._cfg.webhook is not None
        request = urllib.request.Request(self._cfg.webhook, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass

    def _call(self, content: bytes) -> None:
        nothing, program = subprocess.DEVNULL, self._cfg.command[0]  # the arguments may contain secrets
        process = start(self._cfg.command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing)
        self._commands = [other for other in self._commands if other.poll() is None] + [process]
        with process:
            try:
                process.communicate(content, TIMEOUT_S)
            except subprocess.TimeoutExpired as late:
                kill_group(process)
                raise subprocess.TimeoutExpired(program, late.timeout) from None
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, program)


@dataclass(slots=True)
class RewardAlarm:
    """Reports jumps in the mean score of a data source, caused by a broken grader, other data or an exploited reward.

    It compares the mean of a step with the means of the previous ``steps`` steps. It stays silent until half of them are
    available.

    A jump exceeds ``deviations`` standard deviations of the previous means, and of the step's own mean, because a mean of few
    scores varies. 0 disables the alarm.
    """

    deviations: float = 5.0
    steps: int = 20
    _means: dict[str, deque[float]] = field(default_factory=dict)  # by metric
    _samples: float = 0.0  # scores of all previous steps

    def lines(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield messages about a step, and add it to the history. Exhaust the iterator."""
        names = sorted(name for name in metrics if name.startswith(f"{MEAN}/")) or [MEAN] * (MEAN in metrics)
        number = (metrics.get(SAMPLES, 0.0) - self._samples) / max(len(names), 1)
        self._samples = metrics.get(SAMPLES, self._samples)
        own = metrics.get(DEVIATION, 0.0) / math.sqrt(number) if number > 0 else 0.0
        for name in names if self.deviations else []:
            known = self._means.setdefault(name, deque(maxlen=self.steps))
            if len(known) >= max(self.steps // 2, 2):
                before, spread = statistics.fmean(known), statistics.pstdev(known)
                span = metrics.get(MAX, 0.0) - metrics.get(MIN, 0.0)
                if abs(metrics[name] - before) > max(self.deviations * max(spread, own), LEAST_SHARE * span):
                    away = f"{abs(metrics[name] - before) / spread:.3g} deviations" if spread else "a jump"
                    of = f" of data source {name.removeprefix(f'{MEAN}/')!r}" if name != MEAN else ""
                    yield (
                        f"the mean score{of} is {metrics[name]:.4g}, {away} from the mean {before:.4g} of the previous "
                        f"{len(known)} steps: check the responses under rollouts/"
                    )
            known.append(metrics[name])
