"""Environments in worker processes. Each session belongs to one process, and moves to another if that process is lost."""

from __future__ import annotations

import asyncio
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import AGENT, ASKING, ROLLOUT
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import run
from rlhf_mcore.environments.worker import KEY
from rlhf_mcore.own_processes import MAX_STARTS, START_TIMEOUT_S, ProcessLost, WorkerProcess, encode, loading_problem
from rlhf_mcore.redaction import redact
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, WorkerLimits, default_workers

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config, EnvironmentConfig

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


@dataclass(slots=True, eq=False)
class Session:
    """A session of an environment. It has one call at a time. ``close`` must end it."""

    sessions: Sessions
    number: int
    row: Mapping[str, Any]
    seed: int
    actions: list[Any] = field(default_factory=list)
    host: _Host | None = None
    is_there: bool = False  # the session is open in the host's process
    tries: int = 0  # failed tries of the current call
    answer: asyncio.Future[StepResult] | None = None  # answer to the current call

    async def reset(self) -> StepResult:
        """Return the first observation.

        Raises:
            ConfigError: the class cannot be loaded, or too many calls in a row got no answer.
        """
        return await self.sessions.call(self)

    async def step(self, action: Any) -> StepResult:
        """Return the result of an action. Raises the errors of ``reset``."""
        self.actions.append(action)
        return await self.sessions.call(self)

    def close(self) -> None:
        """Close the session. If it waits for an answer, the answer is dropped."""
        self.sessions.close(self)


class Sessions:
    """Sessions of one environment class. Only one event loop at a time may use them.

    Args:
        spec: ``environment.function``: a class in a file, or the name of a built-in class.
        options: arguments of its constructor.
        limits: limits of the worker processes. ``timeout_s`` limits one call.
        folder: working directory of the processes; None: the directory of this process.
        isolates: whether a call runs alone if it may have ended its process ``limits.retries`` times. Otherwise it then fails. Calls
            that wait for each other cannot run alone.
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any],
        limits: WorkerLimits,
        folder: str | None = None,
        isolates: bool = True,
    ) -> None:
        self.name = f"{KEY}={spec}"
        order = {
            "spec": spec,
            "options": dict(options),
            "memory_bytes": limits.memory_bytes,
            "folder": folder or os.getcwd(),
        }
        self._order = encode(order)
        self._limits, self._isolates = limits, isolates
        self._hosts: list[_Host] = []
        self._sessions: dict[int, Session] = {}
        self._numbers = count()
        self._lost_in_a_row = 0
        self._killed_starts = 0  # consecutive processes that were killed while they loaded the class
        self._loading: asyncio.Future[None] | None = None  # resolved when a process has loaded the class
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[int, int] = {}  # descriptors that the loop watches, with their events
        self._timer: asyncio.TimerHandle | None = None  # at the next deadline
        self.bound = f"environment.timeout_s={limits.timeout_s:g} s"
        self.close_all = weakref.finalize(self, _stop, self._hosts, os.getpid())

    @property
    def places(self) -> int:
        """Return the number of concurrent calls of asynchronous environments, over all processes."""
        return self._limits.workers * MAX_CONCURRENT

    async def check(self) -> None:
        """Start a process and load the class, to find errors early.

        Raises:
            ConfigError: the class cannot be loaded.
        """
        if not any(host.ready for host in self._hosts):
            self._loading = asyncio.get_running_loop().create_future()
            if not self._hosts:
                self._start()
            self._watch()
            await self._loading

    def open(self, row: Mapping[str, Any], seed: int) -> Session:
        """Open a session of the row."""
        session = Session(self, next(self._numbers), row, seed)
        self._sessions[session.number] = session
        return session

    async def call(self, session: Session) -> StepResult:
        """Run the reset or the last action of a session. Called by the session."""
        session.tries = 0
        session.answer = asyncio.get_running_loop().create_future()
        self._handle_events([self._queue(session)])
        return await session.answer

    def close(self, session: Session) -> None:
        """Close a session. Called by the session."""
        self._sessions.pop(session.number, None)
        if (host := session.host) is not None:
            session.host = None
            host.sessions.discard(session.number)
            if session.number in host.waiting:
                host.waiting.remove(session.number)
            # A call in progress stays in host.calls until the worker answers or the deadline passes.
            if session.is_there:
                host.process.send(encode({"close": session.number}))
                self._handle_events([host])

    # ------------------------------------------------------------------------------------------------------- processes
    def _queue(self, session: Session) -> _Host:
        """Queue the current call of a session, in the session's process or in a new one. Returns the process."""
        if session.host is None:
            host = min(self._hosts, key=lambda host: len(host.sessions), default=None)
            if host is None or (host.sessions and len(self._hosts) < self._limits.workers):
                host = self._start()
            session.host, session.is_there = host, False
            host.sessions.add(session.number)
        session.host.waiting.append(session.number)
        return session.host

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

    def _handle_events(self, hosts: Sequence[_Host] | None = None) -> None:
        """Send calls to these processes, take answers, and repeat the calls of lost processes. None: all processes.

        The event loop calls it at each event.
        """
        try:
            self._give_out()
            for host in list(self._hosts if hosts is None else hosts):
                self._exchange(host)
            self._give_out()
        except Exception as error:
            waiting = [session.answer for session in self._sessions.values()]
            for future in (self._loading, *waiting):
                if future is not None and not future.done():
                    future.set_exception(error)
        self._watch()

    def _exchange(self, host: _Host) -> None:
        """Send and receive without waiting. Answers are taken before deadlines are checked, because this thread may be late."""
        ending = host.process.ending()
        try:
            messages = host.process.exchange()
        except ProcessLost as lost:
            self._lose(host, lost.cause, list(host.calls))
            return
        for message in messages:
            self._take(host, message)
        now = time.monotonic()
        if host not in self._hosts:
            return
        if ending is not None:
            self._lose(host, ending, list(host.calls))
        elif not host.ready and now >= host.deadline:
            self._lose(host, f"took longer than {START_TIMEOUT_S:g} s", [])
        elif late := [number for number, deadline in host.calls.items() if now >= deadline]:
            self._lose(host, f"gave no answer within {self.bound}", late, timed_out=True)

    def _watch(self) -> None:
        """Let the event loop call ``_handle_events`` when a process can be read or written, and at the next deadline."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._watched, self._timer = loop, {}, None
        for host in self._hosts:
            for descriptor, events in host.process.interests():
                if self._watched.get(descriptor) == events:
                    continue
                loop.add_reader(descriptor, self._handle_events)
                if events & select.POLLOUT:
                    loop.add_writer(descriptor, self._handle_events)
                else:
                    loop.remove_writer(descriptor)
                self._watched[descriptor] = events
        if self._timer is not None:
            self._timer.cancel()
        deadlines = [at for host in self._hosts for at in (host.calls.values() if host.ready else [host.deadline])]
        self._timer = loop.call_at(min(deadlines), self._handle_events) if deadlines else None

    def _end(self, host: _Host) -> None:
        """Stop a process."""
        self._hosts.remove(host)
        for descriptor, _ in host.process.interests():
            if (
                self._watched.pop(descriptor, None) is not None
                and self._loop is not None
                and not self._loop.is_closed()
            ):
                self._loop.remove_reader(descriptor)
                self._loop.remove_writer(descriptor)
        host.process.stop()

    def _take(self, host: _Host, message: dict[str, Any]) -> None:
        if "problem" in message:
            self._end(host)
            raise ConfigError(message["problem"])
        if "ready" in message:
            self._killed_starts = 0
            host.ready, host.capacity = True, MAX_CONCURRENT if message["concurrent"] else 1
            if self._loading is not None and not self._loading.done():
                self._loading.set_result(None)
        elif "lost" in message:
            cause = f"{message['lost']} (environment.memory_gib={self._limits.memory_gib:g})"
            self._lose(host, cause, [message["session"]])
        elif host.calls.pop(message["session"], None) is not None:
            self._lost_in_a_row = 0
            self._answer(message.pop("session"), StepResult(**message))

    def _answer(self, number: int, answer: StepResult) -> None:
        session = self._sessions.get(number)  # None: it was closed in the meantime
        if session is not None and session.answer is not None and not session.answer.done():
            session.answer.set_result(answer)

    def _lose(self, host: _Host, cause: str, guilty: list[int], timed_out: bool = False) -> None:
        """Stop a lost process, and repeat its calls in other processes.

        Its sessions are replayed there. ``guilty`` are the calls that may have caused the loss. If there is one such call, or if
        the calls passed their deadlines (``timed_out``), each is repeated ``limits.retries`` times at most and then gets an error.
        If several calls may be the cause, each is repeated alone after that (``_is_suspect``), or also fails without ``isolates``.
        """
        isolates = self._isolates and len(guilty) > 1 and not timed_out
        was_killed = host.process.was_killed
        self._end(host)
        tail = f"; it last printed: {host.process.tail.strip()!r}" if host.process.tail.strip() else ""
        if not host.ready:
            self._killed_starts += was_killed
            if not was_killed or self._killed_starts >= MAX_STARTS:
                raise ConfigError(loading_problem(self.name, f"{cause} while it was loaded{tail}", was_killed))
            if self._loading is not None and not self._loading.done():
                self._start()
        pending = [key for key in (*host.calls, *host.waiting) if key in self._sessions]
        for key in host.sessions:
            self._sessions[key].host = None
        for key in pending:
            session = self._sessions[key]
            session.tries += key in guilty
            if session.tries <= self._limits.retries or key not in guilty or isolates:
                self._queue(session)
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


def sessions_of(own: EnvironmentConfig, num_engines: int, folder: str, isolates: bool = True) -> Sessions:
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
    elif own.function == ROLLOUT:
        name = f"rollout.function={options['function']}"
    if own.function in ASKING:
        timeout_s += own.agent.timeout_s * (1 + own.agent.retries)
    variables = list(own.env)
    if own.container.kind is not None:
        from rlhf_mcore.environments.containers.kinds import longest_s, options_of

        options["container"], timeout_s = options_of(own), timeout_s + longest_s(own)
        variables += [own.container.token_env] if own.container.token_env else []
    limits = WorkerLimits(workers, timeout_s, own.memory_gib, tuple(variables))
    sessions = Sessions(own.function, options, limits, folder, isolates)
    sessions.name = name
    if own.function in ASKING:  # it enforces its own deadlines, unless the agent blocks the worker's event loop
        keys = "environment.agent.timeout_s and environment.timeout_s"
        sessions.bound = f"the {timeout_s:g} s of {keys} (a coroutine must wait with await, not with blocking calls)"
    return sessions


def worker_settings(cfg: Config, *, loads_only: bool = False) -> EnvironmentConfig:
    """Return the settings of ``environment``. For a rollout function, ``options`` are the arguments of ``FunctionEnvironment``.

    ``loads_only``: without the tokenizer, which takes seconds to load.
    """
    own = cfg.environment
    if own.function != ROLLOUT:
        return own
    options = {
        "function": cfg.rollout.function,
        "tokenizer": None if loads_only else cfg.model.tokenizer_path or cfg.model.path,
        "template": cfg.data.apply_chat_template,
        "keep": own.rewritten_history == "keep",
        "options": own.options,
    }
    return own.model_copy(update={"options": options})


def check_loads(own: EnvironmentConfig) -> None:
    """Load the configured class once, in a separate process.

    Raises:
        ConfigError: the class cannot be loaded. The message names ``environment.function`` or its options.
    """
    sessions = sessions_of(own, 1, os.getcwd())
    try:
        run(sessions.check())
    finally:
        sessions.close_all()
