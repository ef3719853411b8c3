"""Environments in worker processes. Each session belongs to one process, and moves to another if that process is lost.

There is no background thread. Answers and lost processes are handled in ``poll``.
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import AGENT, ASKING
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.worker import KEY
from rlhf_mcore.own_processes import MAX_STARTS, START_TIMEOUT_S, ProcessLost, WorkerProcess, encode, loading_problem
from rlhf_mcore.redaction import redact
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, WorkerLimits, default_workers

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import EnvironmentConfig

PROGRAM = "rlhf_mcore.environments.worker"
MAX_CONCURRENT = 256  # concurrent calls per process if the environments are asynchronous


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a reset or step: ``messages`` of {"role", "content"}, or an error that explains the cause.

    ``special``: whether names of special tokens in the messages are encoded as these tokens.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    special: bool = False
    error: str = ""
    timed_out: bool = False


@dataclass(slots=True, eq=False)
class _Host:
    """A worker process, the calls that wait for it, and the calls that it runs, with their deadlines."""

    process: WorkerProcess
    deadline: float  # for loading the class
    ready: bool = False
    capacity: int = 1
    waiting: deque[int] = field(default_factory=deque)
    calls: dict[int, float] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)  # assigned to this process, whether opened there yet or not


@dataclass(slots=True)
class _Session:
    row: Mapping[str, Any]
    seed: int
    actions: list[Any] = field(default_factory=list)
    host: _Host | None = None
    is_there: bool = False  # the session is open in the host's process
    tries: int = 0  # failed tries of the current call


class Sessions:
    """Sessions of one environment class. The caller chooses the key of each session.

    Args:
        spec: ``environment.function``: a class in a file, or the name of a built-in class.
        options: arguments of its constructor.
        limits: limits of the worker processes. ``timeout_s`` limits one call.
        folder: working directory of the processes; None: the directory of this process.
    """

    def __init__(self, spec: str, options: Mapping[str, Any], limits: WorkerLimits, folder: str | None = None) -> None:
        self.name = f"{KEY}={spec}"
        order = {
            "spec": spec,
            "options": dict(options),
            "memory_bytes": limits.memory_bytes,
            "folder": folder or os.getcwd(),
        }
        self._order = encode(order)
        self._limits = limits
        self._hosts: list[_Host] = []
        self._sessions: dict[int, _Session] = {}
        self._answers: list[tuple[int, StepResult]] = []
        self._lost_in_a_row = 0
        self._killed_starts = 0  # consecutive processes that were killed while they loaded the class
        self._num_calls = 0
        self.bound = f"environment.timeout_s={limits.timeout_s:g} s"
        self.wake: int | None = None  # a file descriptor; poll stops waiting when it is readable
        self.close_all = weakref.finalize(self, _stop, self._hosts, os.getpid())

    def check(self) -> None:
        """Start a process and load the class, to find errors early.

        Raises:
            ConfigError: the class cannot be loaded.
        """
        while not any(host.ready for host in self._hosts):
            if not self._hosts:
                self._start()
            self._round(None)

    @property
    def num_calls(self) -> int:
        """Return the number of calls whose answer ``poll`` has not returned yet."""
        return self._num_calls

    def open(self, key: int, row: Mapping[str, Any], seed: int) -> None:
        """Start the reset of a new session. ``poll`` returns the first observation."""
        assert key not in self._sessions, key
        self._sessions[key] = _Session(row, seed)
        self._call(key)

    def step(self, key: int, action: Any) -> None:
        """Start a step of a session. ``poll`` returns the result."""
        self._sessions[key].actions.append(action)
        self._call(key)

    def close(self, key: int) -> None:
        """Close a session. If it waits for an answer, the answer is dropped."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._num_calls -= any(key == answered for answered, _ in self._answers)
        self._answers = [(answered, answer) for answered, answer in self._answers if answered != key]
        if (host := session.host) is not None:
            host.sessions.discard(key)
            if key in host.waiting:
                host.waiting.remove(key)
                self._num_calls -= 1
            elif key in host.calls:  # stays in host.calls until the worker answers or the deadline passes
                self._num_calls -= 1
            if session.is_there:
                host.process.send(encode({"close": key}))

    def poll(self, timeout_s: float | None) -> list[tuple[int, StepResult]]:
        """Return the received answers, with the keys of their sessions.

        If calls are in flight, waits for an answer, but at most ``timeout_s`` (None: no limit).

        Raises:
            ConfigError: the class cannot be loaded, or too many calls in a row get no answer.
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._give_out()
            is_woken = bool(self._hosts and not self._answers) and self._round(end)
            if self._answers or is_woken or not self._num_calls or time.monotonic() >= end:
                break
        answers, self._answers = self._answers, []
        self._num_calls -= len(answers)
        return answers

    # ------------------------------------------------------------------------------------------------------- processes
    def _call(self, key: int, again: bool = False) -> None:
        session = self._sessions[key]
        if not again:
            session.tries = 0
            self._num_calls += 1
        if session.host is None:
            host = min(self._hosts, key=lambda host: len(host.sessions), default=None)
            if host is None or (host.sessions and len(self._hosts) < self._limits.workers):
                host = self._start()
            session.host, session.is_there = host, False
            host.sessions.add(key)
        session.host.waiting.append(key)

    def _start(self) -> _Host:
        host = _Host(WorkerProcess(self._order, self._limits.env, PROGRAM), time.monotonic() + START_TIMEOUT_S)
        self._hosts.append(host)
        return host

    def _give_out(self) -> None:
        for host in self._hosts:
            while host.ready and host.waiting and len(host.calls) < host.capacity:
                if host.calls and any(map(self._is_suspect, (host.waiting[0], *host.calls))):
                    break
                key = host.waiting.popleft()
                session = self._sessions[key]
                item: dict[str, Any] = {"session": key, "seed": session.seed, "actions": session.actions[-1:]}
                num_calls = 1
                if not session.is_there:
                    item |= {"row": session.row, "actions": session.actions}
                    session.is_there, num_calls = True, 1 + len(session.actions)
                host.process.send(encode(item))
                host.calls[key] = time.monotonic() + self._limits.timeout_s * num_calls

    def _is_suspect(self, key: int) -> bool:
        """Return whether a call was in flight, among others, each time a process was lost.

        Such a call runs alone, so that the next loss shows which call is the cause.
        """
        session = self._sessions.get(key)
        return session is not None and session.tries > self._limits.retries

    def _round(self, end: float | None) -> bool:
        """Wait for an event, at most until ``end``, and handle it. Returns whether ``wake`` is readable."""
        poll = select.poll()
        deadlines = [math.inf if end is None else end]
        for host in self._hosts:
            for descriptor, wanted in host.process.interests():
                poll.register(descriptor, wanted)
            deadlines += host.calls.values() if host.ready else [host.deadline]
        if self.wake is not None:
            poll.register(self.wake, select.POLLIN)
        events = poll.poll(max(0, math.ceil(1000 * min(min(deadlines) - time.monotonic(), 60.0))))
        for host in list(self._hosts):
            ending = host.process.ending()
            try:
                messages = host.process.exchange()
            except ProcessLost as lost:
                self._lose(host, lost.cause, list(host.calls))
                continue
            for message in messages:
                self._take(host, message)
            now = time.monotonic()
            if host not in self._hosts:
                continue
            if ending is not None:
                self._lose(host, ending, list(host.calls))
            elif not host.ready and now >= host.deadline:
                self._lose(host, f"took longer than {START_TIMEOUT_S:g} s", [])
            elif late := [key for key, deadline in host.calls.items() if now >= deadline]:
                cause = f"gave no answer within {self.bound}"
                self._lose(host, cause, late, timed_out=True)
        return any(descriptor == self.wake for descriptor, _ in events)

    def _take(self, host: _Host, message: dict[str, Any]) -> None:
        if "problem" in message:
            self._hosts.remove(host)
            host.process.stop()
            raise ConfigError(message["problem"])
        if "ready" in message:
            self._killed_starts = 0
            host.ready, host.capacity = True, MAX_CONCURRENT if message["concurrent"] else 1
        elif "lost" in message:
            cause = f"{message['lost']} (environment.memory_gib={self._limits.memory_gib:g})"
            self._lose(host, cause, [message["session"]])
        elif host.calls.pop(message["session"], None) is not None:
            self._lost_in_a_row = 0
            self._answer(message.pop("session"), StepResult(**message))

    def _answer(self, key: int, answer: StepResult) -> None:
        if key in self._sessions:  # not closed in the meantime
            self._answers.append((key, answer))

    def _lose(self, host: _Host, cause: str, guilty: list[int], timed_out: bool = False) -> None:
        """Stop a lost process, and repeat its calls in other processes.

        Its sessions are replayed there. ``guilty`` are the calls that may have caused the loss. If there is one such call, or if
        the calls passed their deadlines (``timed_out``), each is repeated ``limits.retries`` times at most and then gets an error.
        If several calls may be the cause, each is repeated alone after that (``_is_suspect``).
        """
        self._hosts.remove(host)
        was_killed = host.process.was_killed
        host.process.stop()
        tail = f"; it last printed: {host.process.tail.strip()!r}" if host.process.tail.strip() else ""
        if not host.ready:
            self._killed_starts += was_killed
            if not was_killed or self._killed_starts >= MAX_STARTS:
                raise ConfigError(loading_problem(self.name, f"{cause} while it was loaded{tail}", was_killed))
        pending = [key for key in (*host.calls, *host.waiting) if key in self._sessions]
        for key in host.sessions:
            self._sessions[key].host = None
        for key in pending:
            session = self._sessions[key]
            session.tries += key in guilty
            if session.tries <= self._limits.retries or key not in guilty or (len(guilty) > 1 and not timed_out):
                self._call(key, again=True)
                continue
            self._lost_in_a_row += 1
            self._answer(key, StepResult(error=cause + tail, timed_out=timed_out))
            if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
                raise ConfigError(
                    f"{self.name} gave no answer to {MAX_LOST_IN_A_ROW} calls in a row; in the last call it {cause}{tail}. "
                    "Correct it, or raise environment.timeout_s or environment.memory_gib"
                )


def _stop(hosts: list[_Host], owner: int) -> None:
    if os.getpid() == owner:  # a forked process must not stop the workers of its parent
        for host in hosts:
            host.process.stop()


def sessions_of(own: EnvironmentConfig, num_engines: int, folder: str) -> Sessions:
    """Build the sessions of the configured class for one engine. ``num_engines`` engines may share a machine."""
    assert own.function is not None
    workers = own.workers or default_workers(num_engines)
    options, timeout_s, name = own.options or {}, own.timeout_s, f"{KEY}={own.function}"
    if own.function == AGENT:  # one step runs a whole episode, including all tries
        agent = own.agent
        shown = {"command": (agent.command or [""])[0], "function": agent.function, "url": redact(agent.url)}
        name = next((f"environment.agent.{kind}={what}" for kind, what in shown.items() if what), name)
        options = {name: getattr(agent, name) for name in ("command", "function", "url", "timeout_s", "retries")}
        options["max_output_bytes"] = int(agent.max_output_kib * 1024)
    if own.function in ASKING:
        timeout_s += own.agent.timeout_s * (1 + own.agent.retries)
    variables = list(own.env)
    if own.container.kind is not None:
        from rlhf_mcore.environments.containers.kinds import longest_s, options_of

        options["container"], timeout_s = options_of(own), timeout_s + longest_s(own)
        variables += [own.container.token_env] if own.container.token_env else []
    limits = WorkerLimits(workers, timeout_s, own.memory_gib, tuple(variables))
    sessions = Sessions(own.function, options, limits, folder)
    sessions.name = name
    if own.function in ASKING:  # it enforces its own deadlines, unless the agent blocks the worker's event loop
        keys = "environment.agent.timeout_s and environment.timeout_s"
        sessions.bound = f"the {timeout_s:g} s of {keys} (a coroutine must wait with await, not with blocking calls)"
    return sessions


def check_loads(own: EnvironmentConfig) -> None:
    """Load the configured class once, in a separate process.

    Raises:
        ConfigError: the class cannot be loaded. The message names ``environment.function`` or its options.
    """
    sessions = sessions_of(own, 1, os.getcwd())
    try:
        sessions.check()
    finally:
        sessions.close_all()
