"""Simulate an engine with continuous batching as events. An event covers many decode steps."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_ROUNDING = 1e-9  # tolerance, as a share of a decode step


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Durations in an engine, in seconds. A decode step takes ``step_s + sequence_s * n`` and adds a token to each of n sequences."""

    step_s: float
    sequence_s: float
    prompt_s: float = 0.0  # per request when it starts: its share of its prompt's forward pass
    prefix_token_s: float = 0.0  # per token that is computed again after a publish
    slots: int = 256  # sequences that it decodes concurrently

    def decode_s(self, running: float) -> float:
        """Return the seconds of a decode step."""
        return self.step_s + self.sequence_s * running


@dataclass(slots=True)
class SimulatedGroup:
    """The responses to one prompt. A step trains on all of them together.

    ``version``: policy version at submission. ``oldest``: oldest policy version of its tokens.
    """

    unfinished: int
    version: int
    order: int
    tokens: int = 0
    version_sum: float = 0.0  # sum of the versions of its tokens
    oldest: int = 1 << 62
    cancelled: bool = False


@dataclass(slots=True)
class SimulatedRequest:
    """A response. Only the simulation knows its length in advance, not the engine."""

    group: SimulatedGroup
    length: int
    first_step: int = 0  # the engine's count of decode steps when it started


@dataclass(slots=True)
class SimulatedEngine:
    """A simulated engine. Requests start in order, between two decode steps, when a slot is free.

    The state is the state at time ``at``, the end of the last processed decode step. ``next_at`` is the time of the next event.
    Requests, pauses and cancellations take effect at the end of the current decode step.
    """

    times: EngineTimes
    at: float = 0.0
    steps: int = 0
    version: int = 0
    paused: bool = False
    next_at: float = math.inf
    busy_s: float = 0.0
    sequence_seconds: float = 0.0  # integral of the running sequences over time
    running: list[tuple[int, int, SimulatedRequest]] = field(
        default_factory=list
    )  # heap, ordered by the step of the last token
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    publishes: list[int] = field(default_factory=list)  # count of decode steps at each new version
    slowdown: float = 1.0  # factor for all its durations
    _begun: int = 0
    _next_steps: int = 0
    _next_slowdown: float = 1.0
    _pausing: bool = False
    _stale: bool = False  # True if some of its requests are cancelled

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return len(self.running) + len(self.waiting)

    def busy_until(self, now: float) -> float:
        """Return the seconds in which the engine has computed until ``now``."""
        return self.busy_s + (min(now, self.next_at) - self.at if self.running else 0.0)

    def submit(self, requests: Iterable[SimulatedRequest], now: float) -> None:
        """Queue requests."""
        self.waiting.extend(requests)
        self._plan(now)

    def cancel(self, now: float) -> None:
        """Remove the requests of cancelled groups."""
        self._stale = True
        self._plan(now)

    def pause(self, now: float) -> None:
        """Stop at the end of the decode step, or immediately if no sequence is running."""
        if not self.paused:
            self._pausing = bool(self.running)
            self.paused = not self._pausing
            self._plan(now)

    def slow(self, now: float, slowdown: float) -> None:
        """Multiply all durations after the current decode step by ``slowdown``."""
        if slowdown != self._next_slowdown:
            self._next_slowdown = slowdown
            self._plan(now)

    def resume(self, now: float, version: int, *, resubmit: bool) -> None:
        """Continue with new weights. Keys and values of the old weights stay, unless ``resubmit`` computes them again."""
        self.paused, self.version, self.at = False, version, now
        self.publishes.append(self.steps)
        if resubmit and self.running:
            self._compute(self.times.prompt_s * len(self.running))
            done = sum(self.steps - request.first_step for _, _, request in self.running)
            self._compute(self.times.prefix_token_s * done)
        self._admit()
        self._plan(now)

    def settle(self) -> list[SimulatedRequest]:
        """Process the event at ``next_at``. Returns the finished requests."""
        seconds = self.next_at - self.at
        if self.running:
            self.busy_s += seconds
            self.sequence_seconds += seconds * len(self.running)
        self.at, self.steps = self.next_at, self.steps + self._next_steps
        self.slowdown = self._next_slowdown
        finished = []
        while self.running and self.running[0][0] == self.steps:
            finished.append(heapq.heappop(self.running)[2])
        if self._stale:
            self.running = [entry for entry in self.running if not entry[2].group.cancelled]
            heapq.heapify(self.running)
            self.waiting = deque(request for request in self.waiting if not request.group.cancelled)
            self._stale = False
        for request in finished:
            self._count(request)
        if self._pausing:
            self._pausing, self.paused = False, True
        else:
            self._admit()
        self._plan(self.at)
        return [request for request in finished if not request.group.cancelled]

    def _plan(self, now: float) -> None:
        """Choose the next event: the first completion, or the end of the current decode step if a change waits for it."""
        if self.paused or not self.running:
            self.slowdown = self._next_slowdown
        if self.paused:
            self.next_at = math.inf
            return
        if not self.running:
            self._next_steps, self.next_at = 0, max(self.at, now) if self.waiting else math.inf
            return
        step_s, steps = self.slowdown * self.times.decode_s(len(self.running)), self.running[0][0] - self.steps
        changes = self._pausing or self._stale or self.slowdown != self._next_slowdown
        if changes or (self.waiting and len(self.running) < self.times.slots):
            passed = math.ceil((now - self.at) / step_s - _ROUNDING) if step_s > 0 else 0
            steps = min(steps, max(0, passed))
        self._next_steps, self.next_at = steps, self.at + steps * step_s

    def _admit(self) -> None:
        begun = min(len(self.waiting), self.times.slots - len(self.running))
        if begun <= 0:
            return
        self._compute(self.times.prompt_s * begun)
        for _ in range(begun):
            request = self.waiting.popleft()
            request.first_step = self.steps
            self._begun += 1
            heapq.heappush(self.running, (self.steps + request.length, self._begun, request))

    def _compute(self, seconds: float) -> None:
        """Simulate forward passes over prompts. Decoding waits."""
        seconds *= self.slowdown
        self.at += seconds
        self.busy_s += seconds
        self.sequence_seconds += seconds * len(self.running)

    def _count(self, request: SimulatedRequest) -> None:
        """Add the tokens of a finished request and their versions to its group."""
        group, end, newer = request.group, self.steps, self.version
        group.unfinished -= 1
        group.tokens += request.length
        for published in reversed(self.publishes):
            if published <= request.first_step:
                break
            group.version_sum += newer * (end - published)
            end, newer = published, newer - 1
        group.version_sum += newer * (end - request.first_step)
        group.oldest = min(group.oldest, newer)
