"""Simulate the steps of a trainer and its engines under a schedule, as discrete events.

Step k starts with the weights of version k - 1, trains on P prompts with G responses each, and produces version k. After a version
is published, groups are started until (oversample + ``max_staleness``) P untrained groups exist. A step trains on the first P groups
that finish. If more than P groups wait, it takes the oldest. A group restarts with new responses if its oldest token is more than
``max_staleness`` versions old, or may become so before the group finishes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlhf_mcore_contrib.simulate.engine import EngineTimes, SimulatedEngine, SimulatedGroup, SimulatedRequest

DRAIN, CONTINUE, RESUBMIT = "drain", "continue", "resubmit"
TRACED_STEPS = 14
DrawLengths = Callable[[int], list[int]]  # number of a group -> lengths of its responses


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A schedule. ``max_staleness`` 0 is synchronous. ``at_publish`` and ``oversample`` are the keys of the configuration."""

    max_staleness: int = 0
    at_publish: str = DRAIN
    oversample: float = 1.0
    colocated: bool = False

    @property
    def name(self) -> str:
        if not self.max_staleness:
            return "synchronous, colocated" if self.colocated else "synchronous, disaggregated"
        if self.at_publish == DRAIN:
            return "one step off" if self.max_staleness == 1 else f"staleness {self.max_staleness}, drain"
        return f"staleness {self.max_staleness}, partial rollouts"


@dataclass(frozen=True, slots=True)
class TrainTimes:
    """Seconds of a step without generation and sync: a constant part, and a part per response token."""

    step_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown of training while all engines compute, and of decoding while the trainer learns. 1: no slowdown.

    Both share the machine's memory, and the trainer's first rank receives the samples of the engines.
    """

    train: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """The work of a step and the durations of its parts."""

    prompts: int
    samples: int
    num_engines: int
    engine: EngineTimes
    train: TrainTimes
    sync_s: float
    contention: Contention = Contention()

    @property
    def responses(self) -> int:
        """Return the number of responses in a step."""
        return self.prompts * self.samples


@dataclass(slots=True)
class Trace:
    """Events over time, starting at ``begin``.

    ``running`` contains (time, sequences in all engines from then on), in seconds. Spans are (start, end).
    """

    begin: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)
    syncs: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Means over all steps but the first ones, in which the pipeline fills.

    ``staleness``: number of responses for each lag, in versions, of their oldest token behind the trained weights.
    """

    step_s: float
    samples_per_s: float
    rollout_busy: float  # share of time in which an engine computes, mean over engines (0 to 1)
    training_busy: float
    running: float  # sequences per busy engine
    staleness: dict[int, int]
    staleness_mean: float  # over tokens
    length_mean: float  # tokens per trained response; long responses become too old more often
    redrawn: float  # restarted groups per trained group
    trace: Trace

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second. Unlike samples/s, this rate does not rise if long responses are lost."""
        return self.samples_per_s * self.length_mean

    @property
    def staleness_max(self) -> int:
        return max(self.staleness)


def simulate(scenario: Scenario, schedule: StepSchedule, draw: DrawLengths, steps: int) -> ScheduleOutcome:
    """Simulate ``steps`` steps after some initial steps, which are not counted."""
    return _Run(scenario, schedule, draw).play(2 * schedule.max_staleness + 2, steps)


@dataclass(slots=True)
class _Totals:
    """Totals since the start. The difference of two of these gives the counts of a period."""

    now: float
    busy_s: float
    running_s: float
    training_s: float
    redrawn: int
    token_staleness: float
    tokens: int


class _Run:
    def __init__(self, scenario: Scenario, schedule: StepSchedule, draw: DrawLengths) -> None:
        self.scenario, self.schedule, self.draw = scenario, schedule, draw
        self.engines = [SimulatedEngine(scenario.engine) for _ in range(scenario.num_engines)]
        self.groups = math.ceil(scenario.prompts * schedule.oversample - 1e-9)  # started per step
        self.unfinished: dict[int, SimulatedGroup] = {}  # by group number
        self.finished: list[SimulatedGroup] = []
        self.now = 0.0
        self.version = self.drawn = self.started = 0
        self.trainer_at = math.inf  # end of the trainer's current activity
        self.learns, self.slowdown = False, 1.0  # the trainer
        self.training_s = self.token_staleness = 0.0
        self.redrawn = self.tokens = 0
        self.staleness: Counter[int] = Counter()
        self.trace = Trace()

    def play(self, uncounted: int, steps: int) -> ScheduleOutcome:
        self._fill()
        trainer = self._train()
        may_go_on = next(trainer)
        before: _Totals | None = None
        while self.version < uncounted + steps:
            if before is None and self.version == uncounted:
                before = self._totals()
                self.staleness.clear()
                self.trace.begin = self.now
            nexts = [engine.next_at for engine in self.engines]
            self.now = min(self.trainer_at, min(nexts))
            assert self.now < math.inf, "nothing happens any more"
            due = [engine for engine, at in zip(self.engines, nexts, strict=True) if at == self.now]
            groups = [request.group for engine in due for request in engine.settle()]
            # If groups finish at the same time, the group that started first comes first.
            for order in sorted({group.order for group in groups if not group.unfinished}):
                self.finished.append(self.unfinished.pop(order))
            if self.version <= uncounted + TRACED_STEPS:
                self.trace.running.append((self.now, sum(len(engine.running) for engine in self.engines)))
            while may_go_on():
                may_go_on = next(trainer)
            self._slow_each_other()
        assert before is not None
        return self._outcome(before, self._totals(), steps)

    # ------------------------------------------------------------------------------------------------ engines
    def _fill(self) -> None:
        """Start the groups that the new version may sample. Each group goes to the engine with the fewest requests."""
        restarted = self._give_up_old()
        limit = self.groups + self.schedule.max_staleness * self.scenario.prompts
        free = limit - len(self.unfinished) - len(self.finished) - len(restarted)
        loads = [engine.load for engine in self.engines]
        submitted: dict[int, list[SimulatedRequest]] = {}
        for order in [*restarted, *range(self.started, self.started + free)]:
            lengths = self.draw(self.drawn)
            self.drawn += 1
            group = self.unfinished[order] = SimulatedGroup(len(lengths), self.version, order)
            number = loads.index(min(loads))
            loads[number] += len(lengths)
            submitted.setdefault(number, []).extend(SimulatedRequest(group, length) for length in lengths)
        self.started += max(0, free)
        for number, requests in submitted.items():
            self.engines[number].submit(requests, self.now)

    def _give_up_old(self) -> list[int]:
        """Remove groups that are too old and return their numbers. An unfinished group has the version at its submission."""
        oldest = self.version - self.schedule.max_staleness
        stopped = [group for group in self.unfinished.values() if group.version < oldest]
        for group in stopped:
            group.cancelled = True
            del self.unfinished[group.order]
        for engine in self.engines if stopped else ():
            engine.cancel(self.now)
        old = [group for group in self.finished if group.oldest < oldest]
        self.finished = [group for group in self.finished if group.oldest >= oldest]
        self.redrawn += len(stopped) + len(old)
        return sorted(group.order for group in (*stopped, *old))

    # ------------------------------------------------------------------------------------------------ the trainer
    def _train(self) -> Iterator[Callable[[], bool]]:
        """Simulate the trainer's steps. Yields the conditions that it waits for."""
        scenario = self.scenario
        while True:
            yield lambda: len(self.finished) >= scenario.prompts
            by_age = sorted(self.finished, key=lambda group: group.oldest)
            batch, self.finished = by_age[: scenario.prompts], by_age[scenario.prompts :]
            begun, self.learns, self.slowdown = self.now, True, 1.0
            tokens = sum(group.tokens for group in batch)
            self.trainer_at = self.now + scenario.train.step_s + scenario.train.token_s * tokens
            yield self._is_done
            self.learns, self.trainer_at = False, math.inf
            self.training_s += self.now - begun
            self.trace.training.append((begun, self.now))
            if self.schedule.at_publish == DRAIN:
                yield lambda: not self.unfinished
            for engine in self.engines:  # each engine finishes its decode step
                engine.pause(self.now)
            yield lambda: all(engine.paused for engine in self.engines)
            self.trainer_at = self.now + scenario.sync_s
            self.trace.syncs.append((self.now, self.trainer_at))
            yield self._is_done
            self.trainer_at = math.inf
            self._publish(batch)

    def _is_done(self) -> bool:
        return self.trainer_at <= self.now

    def _slow_each_other(self) -> None:
        """Slow down the rest of the trainer's work and the next engine steps while the other side computes."""
        contention = self.scenario.contention
        if self.learns and contention.train != 1:
            busy = sum(bool(engine.running) and not engine.paused for engine in self.engines) / len(self.engines)
            slowdown = 1 + (contention.train - 1) * busy
            self.trainer_at = self.now + (self.trainer_at - self.now) * slowdown / self.slowdown
            self.slowdown = slowdown
        for engine in self.engines if contention.decode != 1 else ():
            engine.slow(self.now, contention.decode if self.learns else 1.0)

    def _publish(self, batch: list[SimulatedGroup]) -> None:
        for group in batch:
            self.staleness[self.version - group.oldest] += self.scenario.samples
            self.token_staleness += self.version * group.tokens - group.version_sum
            self.tokens += group.tokens
        self.version += 1
        for engine in self.engines:
            engine.resume(self.now, self.version, resubmit=self.schedule.at_publish == RESUBMIT)
        self._fill()

    # ------------------------------------------------------------------------------------------------ counting
    def _totals(self) -> _Totals:
        busy_s = sum(engine.busy_until(self.now) for engine in self.engines)
        running_s = sum(engine.sequence_seconds for engine in self.engines)
        counts = (self.redrawn, self.token_staleness, self.tokens)
        return _Totals(self.now, busy_s, running_s, self.training_s, *counts)

    def _outcome(self, before: _Totals, after: _Totals, steps: int) -> ScheduleOutcome:
        seconds, trained = after.now - before.now, steps * self.scenario.prompts
        busy_s = after.busy_s - before.busy_s
        return ScheduleOutcome(
            step_s=seconds / steps,
            samples_per_s=steps * self.scenario.responses / seconds,
            rollout_busy=busy_s / seconds / len(self.engines),
            training_busy=(after.training_s - before.training_s) / seconds,
            running=(after.running_s - before.running_s) / busy_s if busy_s else 0.0,
            staleness=dict(sorted(self.staleness.items())),
            staleness_mean=(after.token_staleness - before.token_staleness) / (after.tokens - before.tokens),
            length_mean=(after.tokens - before.tokens) / (trained * self.scenario.samples),
            redrawn=(after.redrawn - before.redrawn) / trained,
            trace=self.trace,
        )
