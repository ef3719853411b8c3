"""One engine with continuous batching, as events: how long whole batches of decode steps take, without playing every step."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_ROUNDING = 1e-9  # of a decode step


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Seconds of an engine. A decode step of n running sequences takes ``step_s + sequence_s * n`` and adds a token to each."""

    step_s: float
    sequence_s: float
    prompt_s: float = 0.0  # of a request when it begins: its share of its prompt's forward pass
    prefix_token_s: float = 0.0  # of each token that is computed again after a publish
    slots: int = 256  # sequences that it decodes at a time

    def decode_s(self, running: float) -> float:
        """Return the seconds of a decode step."""
        return self.step_s + self.sequence_s * running


@dataclass(slots=True)
class Group:
    """The responses to one prompt, which a step trains on together. Versions are those of the policy.

    ``version``: when it was submitted. ``oldest``: of its tokens.
    """

    unfinished: int
    version: int
    order: int
    tokens: int = 0
    version_sum: float = 0.0  # over its tokens
    oldest: int = 1 << 62
    cancelled: bool = False


@dataclass(slots=True)
class Request:
    """One response: its length is known to the simulation, not to the engine."""

    group: Group
    length: int
    first_step: int = 0  # the engine's count of decode steps when it began


@dataclass(slots=True)
class Engine:
    """Requests begin in their order, when a slot is free, between two decode steps. ``next_at`` is when something happens next.

    The state is that of ``at``, the last border between two decode steps that was looked at. Everything that reaches an engine
    between two steps or within one (requests, a pause, a cancellation) counts from the next border on.
    """

    times: EngineTimes
    at: float = 0.0
    steps: int = 0
    version: int = 0
    paused: bool = False
    next_at: float = math.inf
    busy_s: float = 0.0
    sequence_seconds: float = 0.0  # integral of the running sequences
    running: list[tuple[int, int, Request]] = field(default_factory=list)  # a heap by the step of the last token
    waiting: deque[Request] = field(default_factory=deque)
    publishes: list[int] = field(default_factory=list)  # the count of decode steps at each new version
    slowdown: float = 1.0  # of everything that it computes
    _begun: int = 0
    _next_steps: int = 0
    _next_slowdown: float = 1.0
    _pausing: bool = False
    _stale: bool = False  # some of its requests are cancelled

    @property
    def load(self) -> int:
        """Requests that it has not finished."""
        return len(self.running) + len(self.waiting)

    def busy_until(self, now: float) -> float:
        """Sum the seconds in which it computed, up to now."""
        return self.busy_s + (min(now, self.next_at) - self.at if self.running else 0.0)

    def submit(self, requests: Iterable[Request], now: float) -> None:
        """Queue requests."""
        self.waiting.extend(requests)
        self._plan(now)

    def cancel(self, now: float) -> None:
        """Forget requests of cancelled groups."""
        self._stale = True
        self._plan(now)

    def pause(self, now: float) -> None:
        """Stop at the end of the decode step; at once if there is none."""
        if not self.paused:
            self._pausing = bool(self.running)
            self.paused = not self._pausing
            self._plan(now)

    def slow(self, now: float, slowdown: float) -> None:
        """Make everything from the next border on take ``slowdown`` times as long."""
        if slowdown != self._next_slowdown:
            self._next_slowdown = slowdown
            self._plan(now)

    def resume(self, now: float, version: int, *, resubmit: bool) -> None:
        """Continue with new weights, on the keys and values of the old ones unless ``resubmit`` computes these again."""
        self.paused, self.version, self.at = False, version, now
        self.publishes.append(self.steps)
        if resubmit and self.running:
            self._compute(self.times.prompt_s * len(self.running))
            done = sum(self.steps - request.first_step for _, _, request in self.running)
            self._compute(self.times.prefix_token_s * done)
        self._admit()
        self._plan(now)

    def settle(self) -> list[Request]:
        """Let happen what happens at ``next_at``. Returns the requests that finished."""
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
        """Choose the next event: the first completion, or before it the next border where something waits for one."""
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
        """Forward passes over prompts; decoding waits."""
        seconds *= self.slowdown
        self.at += seconds
        self.busy_s += seconds
        self.sequence_seconds += seconds * len(self.running)

    def _count(self, request: Request) -> None:
        """Add a finished request's tokens and their versions to its group's."""
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
