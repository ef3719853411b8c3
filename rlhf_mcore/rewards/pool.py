"""Pools of workers for what must not run in the trainer. An item is a JSON text.

Each worker has a thread of the pool, which gives it one item at a time. A worker is a process beside the trainer (``LocalWorker``) or
an actor in a Ray cluster (``ray_pool``). One that ends, or takes longer for an item than allowed, is replaced. Answers are JSON and
never unpickled: a worker runs what a user or a model has written.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
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
MAX_WORKERS = 8  # by default; a function that waits for a server wants more
MAX_LOST_IN_A_ROW = 10  # after so many items without an answer, the others would be waited for in vain
CLOSE_TIMEOUT_S = 30.0  # for a worker to be ended; a Ray that is gone may never answer
ASK = b"null"  # an item that asks what was loaded; see ``worker.main``


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bound what a pool of workers uses."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # of each worker
    env: tuple[str, ...] = ()  # names of variables that workers get in addition to ``own_processes.ENVIRONMENT``
    retries: int = 1  # of an item whose worker has ended or was killed, each on a fresh one

    @property
    def memory_bytes(self) -> int:
        """Return the memory of each worker, as the kernel can have it."""
        return int(min(self.memory_gib * 2**30, 2.0**62))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what a pool returns for an item: an answer, or in ``lost`` the cause why there is none."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """Return why there is no result; empty if there is one."""
        return self.lost or self.answer.get("error", "")


# Waits, and returns an outcome for each item, in order; None: the item was left.
Collect = Callable[[], "list[Outcome | None]"]


class Pool(Protocol):
    """Work on items."""

    @property
    def close(self) -> Callable[[], Any]:
        """End what it has started. Who still waits gets an error."""
        ...

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items. With ``stop_at_failure`` the rest is left once an item has failed."""
        ...


class NoResults(ConfigError):
    """So many responses in a row got no result that more would get none. ``timed_out``: the last of them took too long."""

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Interrupted(Exception):
    """The item of a worker is not wanted any more."""


class WorkerLost(Exception):
    """An actor is gone, with the item that it had."""


class PoolEnded(RuntimeError):
    """Report that the machine or cluster of a pool's workers is gone."""


class PoolWorker(Protocol):
    """Take the items of a thread of a pool."""

    interrupted: bool  # by another thread: what it is at raises ``Interrupted``

    def load(self) -> None:
        """Start, and wait until it has loaded; do nothing if it has.

        Raises:
            ConfigError: it cannot be loaded.
        """
        ...

    def answer(self, item: bytes) -> Outcome:
        """Wait for the outcome of an item. If it is lost, the next item has a fresh process."""
        ...

    def interrupt(self) -> None:
        """Called by another thread: end what it is at."""
        ...

    def stop(self) -> None:
        """End it, whatever it is doing. It may be loaded again."""
        ...


class LocalWorker:
    """A process of this machine, which is started again after it has ended."""

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
        """See ``PoolWorker``. The process ends with its connection."""
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
        """End a process that is lost. Returns the cause, with what the process last printed."""
        tail = self._process.tail.strip() if self._process is not None else ""
        self.stop()
        return f"{cause}; it last printed: {tail!r}" if tail else cause


@dataclass(eq=False, slots=True)
class _QueuedItem:
    """An item on its way through a pool."""

    item: bytes
    future: Future[Outcome] = field(default_factory=Future)
    tries: int = 0  # that were lost


class _Threads:
    """The threads of a pool, one for each worker. They hold no reference to the pool, so that it is closed with its last reference."""

    def __init__(self, name: str, limits: WorkerLimits, make_worker: Callable[[], PoolWorker]) -> None:
        self._name, self._limits, self._make_worker = name, limits, make_worker
        self._tasks: SimpleQueue[_QueuedItem | None] = SimpleQueue()  # None: the end of a thread
        self._lock = RLock()  # of what follows
        self._threads: dict[Thread, PoolWorker] = {}
        self._running: dict[Future[Outcome], PoolWorker] = {}
        self._lost_in_a_row = 0
        self.num_answered = 0  # items, but for those that ask
        self._error: Exception | None = None  # why the pool has ended

    def submit(self, items: Sequence[bytes], stop_at_failure: bool) -> Collect:
        """Begin with items. As many workers are started as there are items for."""
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
        return lambda: self._collect([task.future for task in tasks], stop_at_failure)

    def close(self, error: Exception | None = None) -> None:
        """End the workers. Who still waits gets an error."""
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

    def _collect(self, futures: Sequence[Future[Outcome]], stop_at_failure: bool) -> list[Outcome | None]:
        try:
            for future in as_completed(futures):
                if future.result().problem and stop_at_failure:
                    break
            return [future.result() if future.done() else None for future in futures]
        finally:  # also after Ctrl-C: nobody will ask again for what is left
            for future in futures:
                if not future.cancel():
                    with self._lock:
                        if future in self._running:
                            self._running[future].interrupt()

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
                self._load(worker)  # before it takes an item: Ray may have no room for the worker
                task = self._tasks.get()
                if task is not None and (task.tries or task.future.set_running_or_notify_cancel()):
                    self._work(worker, task)
        except ConfigError as error:
            self._fail_waiting(error)
        except (WorkerLost, Interrupted):
            pass  # others are there; or the pool is closed
        except Exception as error:  # no Ray any more, or a mistake of ours: nobody may wait for ever
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
        """Have a worker answer an item, and set its future; after an actor was lost, any worker may try it again."""
        with self._lock:
            self._running[task.future] = worker
        try:
            outcome = self._answer(worker, task)
        except Exception as error:
            self._release(worker, task)
            if isinstance(error, Interrupted):
                task.future.set_exception(self._error or RuntimeError("nobody waits any more"))
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
        """Return the outcome of an item; None: its actor was lost, and it may be tried again."""
        tries_before = task.tries
        while True:
            try:
                outcome = worker.answer(task.item)
            except WorkerLost as lost:
                # Ray kills the process of an actor before the actor ends. Both are one loss.
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
        """Count items that are lost; return an error after ``MAX_LOST_IN_A_ROW`` in a row."""
        with self._lock:
            self._lost_in_a_row = self._lost_in_a_row + 1 if outcome.lost else 0
            self.num_answered += not outcome.lost
            if not self._limits.retries or self._lost_in_a_row < MAX_LOST_IN_A_ROW:
                return None
            self._lost_in_a_row = 0
        return NoResults(
            f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last of them it {outcome.lost}: "
            "correct it, or give it more with reward.timeout_s and reward.memory_gib",
            outcome.timed_out,
        )


class WorkerPool:
    """Runs items on workers that have all loaded the same thing. Workers are started when there is something to do.

    Args:
        name: what is loaded, for messages.
        load, options: its name among ``worker.LOADERS``, and arguments.
        limits: how many workers, and what each of them may use.
        make_worker: makes one; None: a process of this machine.
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
        """Start a worker, so that what cannot be loaded is found now. Returns the worker's description of it.

        Raises:
            ConfigError: it cannot be loaded.
        """
        [outcome] = self.submit([ASK])()
        return outcome.answer if outcome is not None else {}

    @property
    def num_answered(self) -> int:
        """Return the number of items that were answered so far."""
        return self._threads.num_answered

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items, from any thread; see :class:`Pool`.

        What is returned raises ConfigError if nothing can be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        return self._threads.submit(items, stop_at_failure)


def _close(threads: _Threads, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        threads.close()


def encode_item(value: Any) -> bytes:
    """Write an item. Arrays and numbers of numpy, which parquet files hold, become lists and numbers.

    Raises:
        TypeError, ValueError, RecursionError: the value has no JSON form.
    """
    return json.dumps(value, default=_as_plain).encode("ascii")


def _as_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


# Name for messages, what is loaded with which options, limits -> a pool: ``local_pool``, or what makes Ray's.
Pools = Callable[[str, str, Mapping[str, Any], WorkerLimits], WorkerPool]


def local_pool(name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
    """Make a pool of worker processes beside this one."""
    return WorkerPool(name, load, options, limits)


def default_workers(engines: int = 1) -> int:
    """Return this rank's, or one engine's, share of the cores of its machine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = usable_cores() // max(int(ranks) if ranks.isdecimal() else 1, engines, 1)
    return max(1, min(MAX_WORKERS, share))
