"""Alarms: metrics that leave their bounds, judged after every step on the first rank; then notes, posts and commands."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from threading import Thread

from rlhf_mcore.config.schema import AlarmRuleConfig, AlarmsConfig
from rlhf_mcore.metrics.rules import BAD, MEASURES, RULES, MetricRule, Series
from rlhf_mcore.observability.files import json_line
from rlhf_mcore.own_processes import kill_group, start
from rlhf_mcore.redaction import without_secrets

MEAN, MIN, MAX, DEVIATION, SAMPLES = "reward/mean", "reward/min", "reward/max", "reward/std", "progress/samples"
# Of the span of a step's scores: a smaller change of a mean is none, however steady the steps before were
LEAST_SHARE = 0.05
EARLY, RECENT = 20, 200  # values of a metric that are remembered: its first and its last ones
QUIET_STEPS = 10  # without trouble in a row, after which the same alarm may be given again
MESSAGES = ("webhook", "command")  # actions of ``AlarmMessages``


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
    """A rule with what it remembers of its metric. ``trouble`` tells what is wrong with a value of its measure, or nothing."""

    name: str
    metric: str
    measure: str
    trouble: Callable[[float], str | None]
    steps: int
    actions: tuple[str, ...]
    counts: bool = False
    early: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    in_a_row: int = 0
    quiet: int = QUIET_STEPS

    def alarm(self, step: int, value: float) -> Alarm | None:
        """Take one more value, and return the alarm that it begins."""
        if len(self.early) < EARLY:
            self.early.append(value)
        else:
            self.recent.append(value)
        series = [*self.early, *self.recent]
        measure = MEASURES[self.measure]
        judged = measure.now(Series(series)) if len(series) >= measure.least else None
        trouble = None if judged is None else self.trouble(judged)
        if judged is None or trouble is None:
            self.in_a_row, self.quiet = 0, self.quiet + 1
            return None
        self.in_a_row += 1
        if self.quiet < QUIET_STEPS:
            self.quiet = 0
            return None
        if self.in_a_row < self.steps:
            return None
        self.quiet = 0
        return Alarm(step, self.name, self.metric, judged, f"step {step}: alarm: {trouble}", self.actions)


class Alarms:
    """All rules of a run: those of ``cfg``, and the default ones of metrics that these are not about."""

    def __init__(self, cfg: AlarmsConfig) -> None:
        actions = tuple(cfg.actions)
        self._watches = [_own(rule, actions) for rule in cfg.rules]
        self._finite: _Watch | None = None
        if cfg.defaults:
            known = {watch.metric for watch in self._watches}
            self._watches += [
                _default(rule, actions) for rule in RULES if rule.alarm_steps and rule.metric not in known
            ]
            self._finite = _Watch("not finite", "", "value", lambda share: "not finite" if share else None, 1, actions)
        self._samples = 0.0

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        """Yield the alarms that a step begins. To be used up, also for steps before a restart."""
        samples = metrics.get(SAMPLES, self._samples) - self._samples
        self._samples += samples
        for watch in self._watches:
            value = metrics.get(watch.metric)
            if value is None or not math.isfinite(value) or (watch.counts and samples <= 0):
                continue
            if (alarm := watch.alarm(step, value / samples if watch.counts else value)) is not None:
                yield alarm
        # The gradient of an update that was skipped is not finite, which the rule for those tells.
        bad = [name for name, value in metrics.items() if name.endswith("/skipped_updates") and value]
        skipped = {name.replace("skipped_updates", "grad_norm") for name in bad}
        names = sorted(name for name, value in metrics.items() if not math.isfinite(value) and name not in skipped)
        if self._finite is not None and (alarm := self._finite.alarm(step, float(bool(names)))) is not None:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = (
                f"step {step}: alarm: not a finite number: {', '.join(names[:3])}{more}: look at the rollouts of this step; lower the "
                "learning rate"
            )
            yield replace(alarm, metric=names[0], value=metrics[names[0]], text=text)


def _own(rule: AlarmRuleConfig, actions: tuple[str, ...]) -> _Watch:
    """Read a rule of ``alarms.rules``."""
    above, below = rule.above, rule.below
    bounds = [f"{side} {bound:g}" for side, bound in (("above", above), ("below", below)) if bound is not None]
    of = "" if rule.measure == "value" else f" ({MEASURES[rule.measure].text})"

    def trouble(value: float) -> str | None:
        if (above is None or value <= above) and (below is None or value >= below):
            return None
        return f"{rule.metric}{of} is {value:.4g}: the bound of alarms.rules is: {' or '.join(bounds)}"

    own_actions = tuple(rule.actions) if rule.actions is not None else actions
    return _Watch(rule.metric, rule.metric, rule.measure, trouble, rule.steps, own_actions)


def _default(rule: MetricRule, actions: tuple[str, ...]) -> _Watch:
    """Make an alarm of one of the report's rules."""

    def trouble(value: float) -> str | None:
        if rule.judge(value) != BAD:
            return None
        return (
            f"{rule.name} ({rule.metric}) at {rule.shown(value)}, in trouble from {rule.shown(rule.bad)}: {rule.remedy}"
        )

    return _Watch(rule.name, rule.metric, rule.measure, trouble, rule.alarm_steps, actions, rule.counts)


class AlarmBell:
    """Do what a run wants done about alarms: ``cfg`` tells where messages go. On the first rank.

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
        self._run, self._note, self._save, self._stop = run, note, save, stop
        self._messages: AlarmMessages | None = None
        actions = {*cfg.actions, *(action for rule in cfg.rules for action in rule.actions or ())}
        if actions.intersection(MESSAGES):
            self._messages = AlarmMessages(cfg, note)

    def recall(self, metrics: Mapping[str, float]) -> None:
        """Take a step that was made before a restart: what it has shown is known."""
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
            for action in MESSAGES:
                if action in alarm.actions and self._messages is not None:
                    self._messages.send(action, json_line({"run": self._run, **asdict(alarm)}))

    def close(self) -> None:
        """Wait a moment for messages that are under way."""
        if self._messages is not None:
            self._messages.close()


@dataclass(slots=True)
class RewardAlarm:
    """Tells when the mean score of a data source jumps: by a broken grader, other data, or a way around the reward.

    Compares the mean of a step with those of ``steps`` steps before. It is silent until half of them are there.

    ``deviations`` of theirs are what a mean may be away from their mean, and of its own: a mean of few scores varies. 0: off.
    """

    deviations: float = 5.0
    steps: int = 20
    _means: dict[str, deque[float]] = field(default_factory=dict)  # by metric
    _samples: float = 0.0  # scores of all steps before

    def lines(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield what to tell of a step, which then counts among those before. To be used up."""
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
                    away = f"{abs(metrics[name] - before) / spread:.3g} deviations" if spread else "more than ever"
                    of = f" of data source {name.removeprefix(f'{MEAN}/')!r}" if name != MEAN else ""
                    yield (
                        f"the mean score{of} is {metrics[name]:.4g}, {away} from {before:.4g}, that of the {len(known)} steps before: "
                        "look at the responses under rollouts/"
                    )
            known.append(metrics[name])


TIMEOUT_S = 30.0  # of a post or a command
CLOSE_S = 10.0  # for messages that are under way when the run ends


class AlarmMessages:
    """Sends alarms to where ``cfg`` tells. ``note`` shows a line: the first failure of each way."""

    def __init__(self, cfg: AlarmsConfig, note: Callable[[str], None]) -> None:
        self._cfg, self._note = cfg, note
        self._failed: set[str] = set()
        self._sending: list[Thread] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def send(self, action: str, content: bytes) -> None:
        """Begin to send. ``action``: webhook or command."""
        thread = Thread(target=self._try, args=(action, content), name=f"alarm {action}", daemon=True)
        self._sending = [other for other in self._sending if other.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Wait a moment for messages that are under way. A command that takes longer is ended with all that it has started."""
        end = time.monotonic() + CLOSE_S
        for thread in self._sending:
            thread.join(max(end - time.monotonic(), 0.0))
        for process in self._commands:
            if process.poll() is None:
                kill_group(process)

    def _try(self, action: str, content: bytes) -> None:
        try:
            (self._post if action == "webhook" else self._call)(content)
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
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass

    def _call(self, content: bytes) -> None:
        nothing, program = subprocess.DEVNULL, self._cfg.command[0]  # its arguments may be secrets
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
