"""Worker pools for code that must not run in the trainer. Items are JSON texts.

A pool runs one thread per worker, which gives the worker one item at a time. A worker is a process next to the trainer
(``LocalWorker``) or an actor in a Ray cluster (``ray_pool``). A worker that ends or exceeds the time limit of an item is
replaced. Answers are JSON and never unpickled, because a worker runs code from a user or a model.
"""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, current_thread
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError
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
CLOSE_TIMEOUT_S = 30.0  # to stop a worker; a dead Ray cluster may never answer
ASK = b"null"  # an item that asks for a description of the loaded function; see ``worker.main``


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


class Pool(Protocol):
    """A pool that answers items."""

    @property
    def close(self) -> Callable[[], Any]:
        """Stop everything that the pool has started. Waiting callers get an error."""
        ...

    async def answer_all(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> list[Outcome | None]:
        """Return the outcomes of items, in order. None: the item was skipped.

        With ``stop_at_failure``, the remaining items are skipped after the first failure.
        """
        ...


class NoResults(ConfigError):
    """Too many responses in a row got no result, so that further calls are pointless.

    ``timed_out``: the last of these responses reached the deadline.
    """

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Interrupted(Exception):
    """The item of a worker was cancelled."""


class WorkerLost(Exception):
    """An actor was lost together with its item."""


class PoolEnded(RuntimeError):
    """The machine or cluster of a pool's workers is gone."""


class PoolWorker(Protocol):
    """A worker for one thread of a pool."""

    interrupted: bool  # set by another thread; the running call then raises ``Interrupted``

    def load(self) -> None:
        """Start the worker and wait until it has loaded its function. Do nothing if it is loaded.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        ...

    def answer(self, item: bytes) -> Outcome:
        """Wait for the outcome of an item. If the item is lost, the next item gets a fresh process."""
        ...

    def interrupt(self) -> None:
        """Cancel the running call. Called by another thread."""
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
        self._lock, self.interrupted = Lock(), False

    def load(self) -> None:
        """See ``PoolWorker``."""
        if self._process is None or self._process.ending() is not None:
            self.stop()
            self._start()

    def answer(self, item: bytes) -> Outcome:
        """See ``PoolWorker``."""
        self.load()
        assert self._process is not None
        self._process.send(pack(item))
        try:
            message = self._receive(self._limits.timeout_s)
            if "lost" in message:
                raise ProcessLost(f"{message['lost']} (reward.memory_gib={self._limits.memory_gib:g})")
        except ProcessLost as lost:
            late = f"gave no result within reward.timeout_s={self._limits.timeout_s:g} s"
            return Outcome(lost=self._end(late if lost.timed_out else lost.cause), timed_out=lost.timed_out)
        return Outcome(message)

    def interrupt(self) -> None:
        """See ``PoolWorker``. The process ends when it loses its connection."""
        with self._lock:
            self.interrupted = True
            if self._process is not None:
                self._process.disconnect()

    def stop(self) -> None:
        """See ``PoolWorker``."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _start(self) -> None:
        for number in range(1, MAX_STARTS + 1):
            process = WorkerProcess(self._order, self._limits.env, PROGRAM)
            with self._lock:
                self._process = process
            try:
                message = self._receive(START_TIMEOUT_S)
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

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            if self._process is not None and not self.interrupted:
                return self._process.receive(timeout_s)
        except ProcessLost:
            if not self.interrupted:
                raise
        self.stop()
        raise Interrupted

    def _end(self, cause: str) -> str:
        """Stop a lost process. Return the cause with the last output of the process."""
        tail = self._process.tail.strip() if self._process is not None else ""
        self.stop()
        return f"{cause}; it last printed: {tail!r}" if tail else cause


@dataclass(eq=False, slots=True)
class _QueuedItem:
    """An item in the queue of a pool."""

    item: bytes
    future: Future[Outcome] = field(default_factory=Future)
    tries: int = 0  # lost tries


class _Threads:
    """The threads of a pool, one per worker. They hold no reference to the pool, so that dropping the last reference closes it."""

    def __init__(self, name: str, limits: WorkerLimits, make_worker: Callable[[], PoolWorker]) -> None:
        self._name, self._limits, self._make_worker = name, limits, make_worker
        self._tasks: SimpleQueue[_QueuedItem | None] = SimpleQueue()  # None stops a thread
        self._lock = RLock()  # guards the fields below
        self._threads: dict[Thread, PoolWorker] = {}
        self._running: dict[Future[Outcome], PoolWorker] = {}
        self._lost_in_a_row = 0
        self.num_answered = 0  # items, without those equal to ``ASK``
        self._error: Exception | None = None  # why the pool has ended

    def submit(self, items: Sequence[bytes]) -> list[Future[Outcome]]:
        """Submit items. Start workers until there is one per queued item, or the limit is reached."""
        tasks = [_QueuedItem(item) for item in items]
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error))
            for task in tasks:
                self._tasks.put(task)
            for _ in range(min(self._limits.workers - len(self._threads), self._tasks.qsize())):
                worker = self._make_worker()
                thread = Thread(target=self._serve, args=(worker,), name="reward-pool", daemon=True)
                self._threads[thread] = worker
                thread.start()
        return [task.future for task in tasks]

    def cancel(self, futures: Sequence[Future[Outcome]]) -> None:
        """Cancel items that have no outcome yet, and interrupt the workers that run them."""
        for future in futures:
            if not future.cancel():
                with self._lock:
                    if future in self._running:
                        self._running[future].interrupt()

    def close(self, error: Exception | None = None) -> None:
        """Stop the workers. Waiting callers get an error."""
        with self._lock:
            self._error = self._error or error or RuntimeError(f"the workers of {self._name} were closed")
            self._fail_waiting(self._error)
            threads = dict(self._threads)
            for worker in threads.values():
                self._tasks.put(None)
                worker.interrupt()
        for thread in threads:
            if current_thread() not in threads:
                thread.join(CLOSE_TIMEOUT_S)

    def _fail_waiting(self, error: Exception) -> None:
        with suppress(Empty):
            while task := self._tasks.get_nowait():
                if task.tries or task.future.set_running_or_notify_cancel():
                    task.future.set_exception(error)
            self._tasks.put(None)

    # --------------------------------------------------------------------------------------------- in a worker's thread
    def _serve(self, worker: PoolWorker) -> None:
        try:
            while self._error is None:
                self._load(worker)  # before it takes an item, because Ray may have no capacity for the worker
                task = self._tasks.get()
                if task is not None and (task.tries or task.future.set_running_or_notify_cancel()):
                    self._work(worker, task)
        except ConfigError as error:
            self._fail_waiting(error)
        except (WorkerLost, Interrupted):
            pass  # other workers continue, or the pool is closed
        except Exception as error:  # Ray is gone or this code has a bug; waiting callers must get an error
            self.close(error)
        finally:
            worker.stop()
            with self._lock:
                self._threads.pop(current_thread(), None)

    def _load(self, worker: PoolWorker) -> None:
        try:
            worker.load()
        except WorkerLost as lost:
            if len(self._threads) > 1:
                raise
            raise ConfigError(f"{self._name} {lost}") from lost

    def _work(self, worker: PoolWorker, task: _QueuedItem) -> None:
        """Let a worker answer an item, and set the item's future. If an actor was lost, put the item back into the queue."""
        with self._lock:
            self._running[task.future] = worker
        try:
            outcome = self._answer(worker, task)
        except Exception as error:
            self._release(worker, task)
            if isinstance(error, Interrupted):
                task.future.set_exception(self._error or RuntimeError("the item was cancelled"))
                return
            task.future.set_exception(error)
            raise
        self._release(worker, task)
        if outcome is None:
            self._tasks.put(task)
        elif task.item == ASK or (no_results := self._count(outcome)) is None:
            task.future.set_result(outcome)
        else:
            task.future.set_exception(no_results)
            self._fail_waiting(no_results)

    def _answer(self, worker: PoolWorker, task: _QueuedItem) -> Outcome | None:
        """Return the outcome of an item, or None if its actor was lost and the item may be retried."""
        tries_before = task.tries
        while True:
            try:
                outcome = worker.answer(task.item)
            except WorkerLost as lost:
                # Ray kills the process of an actor before the actor ends. Count both as one loss.
                task.tries = max(task.tries, tries_before + 1)
                return None if task.tries <= self._limits.retries else Outcome(lost=str(lost))
            task.tries += bool(outcome.lost)
            if not outcome.lost or task.tries > self._limits.retries:
                return outcome

    def _release(self, worker: PoolWorker, task: _QueuedItem) -> None:
        with self._lock:
            del self._running[task.future]
            if worker.interrupted and self._error is None:
                worker.stop()
                worker.interrupted = False

    def _count(self, outcome: Outcome) -> NoResults | None:
        """Count lost items. Return an error after ``MAX_LOST_IN_A_ROW`` in a row."""
        with self._lock:
            self._lost_in_a_row = self._lost_in_a_row + 1 if outcome.lost else 0
            self.num_answered += not outcome.lost
            if not self._limits.retries or self._lost_in_a_row < MAX_LOST_IN_A_ROW:
                return None
            self._lost_in_a_row = 0
        return NoResults(
            f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last response it {outcome.lost}. "
            "Correct it, or raise reward.timeout_s or reward.memory_gib",
            outcome.timed_out,
        )


class WorkerPool:
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
        self._threads = _Threads(name, limits, make_worker or partial(LocalWorker, name, load, options, limits))
        self.close = weakref.finalize(self, _close, self._threads, os.getpid())

    def check(self) -> dict[str, Any]:
        """Start a worker, so that loading errors appear now. Return the worker's description of the loaded function.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        futures = self._threads.submit([ASK])
        try:
            return futures[0].result().answer
        finally:  # also after Ctrl-C
            self._threads.cancel(futures)

    @property
    def num_answered(self) -> int:
        """Return the number of items answered so far."""
        return self._threads.num_answered

    async def answer_all(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> list[Outcome | None]:
        """Return the outcomes of items; see :class:`Pool`.

        Raises:
            ConfigError: the function cannot be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        futures = self._threads.submit(items)
        waits = [asyncio.wrap_future(future) for future in futures]
        for wait in waits:
            wait.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # otherwise asyncio logs errors that the caller does not read
        try:
            for wait in asyncio.as_completed(waits):
                if (await wait).problem and stop_at_failure:
                    break
            return [future.result() if future.done() else None for future in futures]
        finally:
            self._threads.cancel(futures)
            for wait in waits:
                wait.cancel()


def _close(threads: _Threads, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from the owner
        threads.close()


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
