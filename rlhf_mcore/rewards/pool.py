"""Worker pools for code that must not run in the trainer. Items are JSON texts.

A pool runs in a background thread, which gives each worker one item at a time. A worker is a process next to the trainer
(``LocalWorker``) or an actor in a Ray cluster (``ray_pool``). A worker that ends or exceeds the time limit of an item is
replaced. Answers are JSON and never unpickled, because a worker runs code from a user or a model.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import Background, cancel_all, run
from rlhf_mcore.machine import usable_cores
from rlhf_mcore.own_processes import (
    MAX_STARTS,
    START_TIMEOUT_S,
    ProcessLost,
    WorkerProcess,
    encode,
    loading_problem,
    pack,
)

PROGRAM = "rlhf_mcore.rewards.worker"
MAX_WORKERS = 8  # default limit; a function that waits for a server needs more workers
MAX_LOST_IN_A_ROW = 10  # after this many lost items in a row, the remaining items are unlikely to succeed
ASK = b"null"  # an item that asks for a description of the loaded function; see ``worker.main``

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker pool."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # per worker
    env: tuple[str, ...] = ()  # environment variables that workers get in addition to ``own_processes.ENVIRONMENT``
    retries: int = 1  # per item whose worker ended or was killed; each retry uses a fresh worker

    @property
    def memory_bytes(self) -> int:
        """Return the memory limit of each worker, at most the largest limit that the kernel accepts."""
        return int(min(self.memory_gib * 2**30, 2.0**62))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pool for an item: an answer, or in ``lost`` the cause of the loss."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """Return why there is no result, or "" if there is one."""
        return self.lost or self.answer.get("error", "")


class NoResults(ConfigError):
    """Too many responses in a row got no result, so that further calls are pointless.

    ``timed_out``: the last of these responses reached the deadline.
    """

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class WorkerLost(Exception):
    """An actor was lost together with its item."""


class PoolEnded(RuntimeError):
    """The machine or cluster of a pool's workers is gone."""


class PoolWorker(Protocol):
    """A worker of a pool. If a call is cancelled, the pool stops the worker."""

    async def load(self) -> None:
        """Start the worker and wait until it has loaded its function. Do nothing if it is loaded.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        ...

    async def answer(self, item: bytes) -> Outcome:
        """Wait for the outcome of an item. If the item is lost, the next item gets a fresh process."""
        ...

    def stop(self) -> None:
        """Stop the worker, whatever it is doing. It may be loaded again."""
        ...


class LocalWorker:
    """A process on this machine. It is restarted after it has ended."""

    def __init__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> None:
        self._name, self._limits = name, limits
        self._order = encode({"load": load, "options": dict(options), "memory_bytes": limits.memory_bytes})
        self._process: WorkerProcess | None = None

    async def load(self) -> None:
        """See ``PoolWorker``."""
        if self._process is None or self._process.ending() is not None:
            self.stop()
            await self._start()

    async def answer(self, item: bytes) -> Outcome:
        """See ``PoolWorker``."""
        await self.load()
        assert self._process is not None
        self._process.send(pack(item))
        try:
            message = await _receive(self._process, self._limits.timeout_s)
            if "lost" in message:
                raise ProcessLost(f"{message['lost']} (reward.memory_gib={self._limits.memory_gib:g})")
        except ProcessLost as lost:
            late = f"gave no result within reward.timeout_s={self._limits.timeout_s:g} s"
            return Outcome(lost=self._end(late if lost.timed_out else lost.cause), timed_out=lost.timed_out)
        return Outcome(message)

    def stop(self) -> None:
        """See ``PoolWorker``."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    async def _start(self) -> None:
        for number in range(1, MAX_STARTS + 1):
            self._process = process = WorkerProcess(self._order, self._limits.env, PROGRAM)
            try:
                message = await _receive(process, START_TIMEOUT_S)
                break
            except ProcessLost as lost:
                was_killed = not lost.timed_out and process.was_killed
                cause = f"took longer than {START_TIMEOUT_S:g} s" if lost.timed_out else lost.cause
                cause = self._end(f"{cause} while it was loaded")
                if not was_killed or number == MAX_STARTS:
                    raise ConfigError(loading_problem(self._name, cause, was_killed)) from lost
        if "problem" in message:
            self.stop()
            raise ConfigError(message["problem"])

    def _end(self, cause: str) -> str:
        """Stop a lost process. Return the cause with the last output of the process."""
        tail = self._process.tail.strip() if self._process is not None else ""
        self.stop()
        return f"{cause}; it last printed: {tail!r}" if tail else cause


async def _receive(process: WorkerProcess, timeout_s: float) -> dict[str, Any]:
    """Send what is queued for a process, and wait for its next message.

    Raises:
        ProcessLost: the process has ended, or no message has arrived within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ending = process.ending()  # check this before reading the last messages, so that no message is lost
        if messages := process.exchange():
            return messages[0]
        if ending is not None:
            raise ProcessLost(ending)
        if (left_s := deadline - time.monotonic()) <= 0:
            raise ProcessLost("", timed_out=True)
        await _wait_for_any(process.interests(), left_s)


async def _wait_for_any(interests: Sequence[tuple[int, int]], timeout_s: float) -> None:
    """Wait at most ``timeout_s`` for an event of one of the descriptors."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    timer = loop.call_later(timeout_s, wake)
    for descriptor, wanted in interests:
        loop.add_reader(descriptor, wake)
        if wanted & select.POLLOUT:
            loop.add_writer(descriptor, wake)
    try:
        await ready
    finally:
        timer.cancel()
        for descriptor, _ in interests:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)


class BackgroundPool(ABC):
    """Answers items in a background thread, because an engine blocks the loop of the caller.

    ``close`` stops everything that the pool has started. Waiting callers get an error. A pool without references is
    closed.
    """

    def __init__(self, name: str, batch_size: int = 1) -> None:
        self.name, self._batch_size = name, batch_size
        self._background = Background(type(self).__name__)
        self.close = weakref.finalize(self, _close, self._background, os.getpid())

    @abstractmethod
    async def _answer(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome]:
        """Return the outcomes of a batch of items."""

    async def answer_all(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> list[Outcome | None]:
        """Return the outcomes of items, in order. None: the item was skipped.

        With ``stop_at_failure``, the remaining items are skipped after the first failure.

        Raises:
            ConfigError: no item can be answered, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        wait = asyncio.wrap_future(self._begin(self._answer_all(items, stop_at_failure)))
        try:
            await asyncio.wait([wait])
        finally:
            wait.cancel()
        if wait.cancelled():
            raise RuntimeError(f"the workers of {self.name} were closed")
        return wait.result()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if not self.close.alive:
            work.close()
            raise RuntimeError(f"the workers of {self.name} were closed")
        return self._background.start(work)

    async def _answer_all(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(items)

        async def answer(start: int) -> bool:
            batch = await self._answer(items[start : start + self._batch_size], stop_at_failure)
            outcomes[start : start + len(batch)] = batch
            return any(outcome.problem for outcome in batch)

        tasks = [asyncio.create_task(answer(start)) for start in range(0, len(items), self._batch_size)]
        try:
            for task in asyncio.as_completed(tasks):
                if await task and stop_at_failure:
                    break
        finally:
            await cancel_all(tasks)
        return outcomes


def _close(background: Background, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from the owner
        background.close()


class WorkerPool(BackgroundPool):
    """Runs items on workers that have all loaded the same function. Workers are started on demand.

    Args:
        name: name of the function, for messages.
        load, options: key of ``worker.LOADERS``, and arguments for the loader.
        limits: number of workers, and limits of each worker.
        make_worker: builds a worker; None: a process on this machine.
    """

    def __init__(
        self,
        name: str,
        load: str,
        options: Mapping[str, Any],
        limits: WorkerLimits,
        make_worker: Callable[[], PoolWorker] | None = None,
    ) -> None:
        super().__init__(name)
        self._limits, self._make_worker = limits, make_worker or partial(LocalWorker, name, load, options, limits)
        self._num_workers = 0
        self._idle: list[PoolWorker] = []  # loaded workers
        self._waiting: deque[asyncio.Future[PoolWorker]] = deque()  # items without a worker
        self._loading: set[asyncio.Task[None]] = set()
        self._lost_in_a_row = 0
        self._ended: PoolEnded | None = None
        self.num_answered = 0  # items, without those equal to ``ASK``

    def check(self) -> dict[str, Any]:
        """Start a worker, so that loading errors appear now. Return the worker's description of the loaded function.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        [outcome] = run(self.answer_all([ASK]))
        assert outcome is not None
        return outcome.answer

    async def _answer(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome]:
        [item] = items
        tries = 0  # lost tries
        while True:
            worker, tries_before = await self._take_worker(), tries
            try:
                outcome = await worker.answer(item)
                while outcome.lost and (tries := tries + 1) <= self._limits.retries:
                    outcome = await worker.answer(item)
            except WorkerLost as lost:
                # Ray kills the process of an actor before the actor ends. Count both as one loss.
                tries = max(tries, tries_before + 1)
                if tries <= self._limits.retries:
                    continue
                outcome = Outcome(lost=str(lost))
            except PoolEnded as error:
                self._fail_waiting(error)
                raise
            except BaseException:  # for example, the item was cancelled
                worker.stop()
                raise
            finally:
                self._load_soon(worker)
            if item != ASK:
                self._count(outcome)
            return [outcome]

    async def _take_worker(self) -> PoolWorker:
        """Return a loaded worker. If all are busy and their number is below the limit, start one."""
        if self._ended is not None:
            raise self._ended
        if self._idle:
            return self._idle.pop()
        waiting: asyncio.Future[PoolWorker] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        if self._num_workers < self._limits.workers:
            self._num_workers += 1
            worker = self._make_worker()
            self._background.resources.callback(worker.stop)
            self._load_soon(worker)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and not waiting.exception():
                self._load_soon(waiting.result())
            raise

    def _load_soon(self, worker: PoolWorker) -> None:
        """Load a worker and give it to an item. A loaded worker does not hold an item, because Ray may have no capacity for it."""
        if self.close.alive and self._ended is None:
            task = asyncio.create_task(self._load(worker))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def _load(self, worker: PoolWorker) -> None:
        try:
            await worker.load()
        except Exception as error:
            worker.stop()
            self._num_workers -= 1
            if not isinstance(error, WorkerLost):
                self._fail_waiting(error)
            elif not self._num_workers:  # otherwise the other workers continue
                self._fail_waiting(ConfigError(f"{self.name} {error}"))
            return
        while self._waiting:
            if not (first := self._waiting.popleft()).done():
                first.set_result(worker)
                return
        self._idle.append(worker)

    def _fail_waiting(self, error: Exception) -> None:
        """Report an error to the items without a worker. After ``PoolEnded``, no worker is started."""
        if isinstance(error, PoolEnded):
            self._ended = error
        while self._waiting:
            if not (first := self._waiting.popleft()).done():
                first.set_exception(error)

    def _count(self, outcome: Outcome) -> None:
        """Count lost items.

        Raises:
            NoResults: ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        self._lost_in_a_row = self._lost_in_a_row + 1 if outcome.lost else 0
        self.num_answered += not outcome.lost
        if self._limits.retries and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            error = NoResults(
                f"{self.name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last response it {outcome.lost}. "
                "Correct it, or raise reward.timeout_s or reward.memory_gib",
                outcome.timed_out,
            )
            self._fail_waiting(error)
            raise error


def encode_item(value: Any) -> bytes:
    """Encode an item as JSON. NumPy arrays and numbers, which parquet files contain, become lists and numbers.

    Raises:
        TypeError, ValueError, RecursionError: the value has no JSON form.
    """
    return json.dumps(value, default=_as_plain).encode("ascii")


def _as_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


# (name for messages, key of LOADERS, options, limits) -> pool. ``local_pool``, or ``RayPools`` for Ray.
Pools = Callable[[str, str, Mapping[str, Any], WorkerLimits], WorkerPool]


def local_pool(name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
    """Build a pool of worker processes on this machine."""
    return WorkerPool(name, load, options, limits)


def default_workers(engines: int = 1) -> int:
    """Return the share of this machine's cores for this rank or for one engine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = usable_cores() // max(int(ranks) if ranks.isdecimal() else 1, engines, 1)
    return max(1, min(MAX_WORKERS, share))
