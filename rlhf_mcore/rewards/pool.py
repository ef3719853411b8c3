"""A pool of workers for what must not run in the trainer.

Each worker has a thread of the pool, which gives it one item at a time. A worker is a process beside the trainer (``LocalWorker``) or
an actor in a Ray cluster (``ray_pool``). One that ends, or takes longer for an item than allowed, is replaced.
"""

from __future__ import annotations

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
from rlhf_mcore.rewards.frames import encode, pack
from rlhf_mcore.rewards.items import MAX_LOST_IN_A_ROW, Collect, NoResults, Outcome, WorkerLimits
from rlhf_mcore.rewards.process import START_TIMEOUT_S, ProcessLost, WorkerProcess

CLOSE_TIMEOUT_S = 30.0  # for a worker to be ended; a Ray that is gone may never answer
ASK = b"null"  # an item that asks what was loaded; see ``worker.main``


class Interrupted(Exception):
    """Nobody wants any more what a worker is at."""


class WorkerLost(Exception):
    """An actor is gone, with the item that it had."""


class PoolEnded(RuntimeError):
    """Tell that the machine or cluster of a pool's workers is gone."""


class PoolWorker(Protocol):
    """Take the items of a thread of a pool."""

    interrupted: bool  # by another thread: what it is at raises ``Interrupted``

    def load(self) -> None:
        """Start, and wait until it has loaded; nothing where it has.

        Raises:
            ConfigError: it cannot be loaded.
        """
        ...

    def answer(self, item: bytes) -> Outcome:
        """Wait for the outcome of an item. Where that is lost, the next item has a fresh process."""
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
        process = WorkerProcess(self._order, self._limits.env)
        with self._lock:
            self._process = process
        try:
            message = self._receive(START_TIMEOUT_S)
        except ProcessLost as lost:
            cause = f"took longer than {START_TIMEOUT_S:g} s" if lost.timed_out else lost.cause
            cause = self._end(f"{cause} while it was loaded")
            raise ConfigError(f"{self._name} {cause}: correct the file") from lost
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
class _Task:
    """An item on its way through a pool."""

    item: bytes
    future: Future[Outcome] = field(default_factory=Future)
    tries: int = 0  # that were lost


class _Threads:
    """The threads of a pool, one for each worker. They do not hold the pool itself, which is closed when nobody else does."""

    def __init__(self, name: str, limits: WorkerLimits, make_worker: Callable[[], PoolWorker]) -> None:
        self._name, self._limits, self._make_worker = name, limits, make_worker
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()  # None: the end of a thread
        self._lock = RLock()  # of what follows
        self._threads: dict[Thread, PoolWorker] = {}
        self._running: dict[Future[Outcome], PoolWorker] = {}
        self._lost_in_a_row = 0
        self._error: Exception | None = None  # why the pool has ended

    def submit(self, items: Sequence[bytes], stop_at_failure: bool) -> Collect:
        """Begin with items. As many workers are started as there are items for."""
        tasks = [_Task(item) for item in items]
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

    def _work(self, worker: PoolWorker, task: _Task) -> None:
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
        elif (no_results := self._count(outcome)) is None:
            task.future.set_result(outcome)
        else:
            task.future.set_exception(no_results)
            self._fail_waiting(no_results)

    def _answer(self, worker: PoolWorker, task: _Task) -> Outcome | None:
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

    def _release(self, worker: PoolWorker, task: _Task) -> None:
        with self._lock:
            del self._running[task.future]
            if worker.interrupted and self._error is None:
                worker.stop()
                worker.interrupted = False

    def _count(self, outcome: Outcome) -> NoResults | None:
        """Count items that are lost; returns an error where as many in a row were as may be."""
        with self._lock:
            self._lost_in_a_row = self._lost_in_a_row + 1 if outcome.lost else 0
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
        """Start a worker, so that what cannot be loaded is found now. Returns what the worker tells of what it has loaded.

        Raises:
            ConfigError: it cannot be loaded.
        """
        [outcome] = self.submit([ASK])()
        return outcome.answer if outcome is not None else {}

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items, from any thread; see :class:`rlhf_mcore.rewards.items.Pool`.

        What is returned raises ConfigError where nothing can be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        return self._threads.submit(items, stop_at_failure)


def _close(threads: _Threads, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        threads.close()
