"""A pool of workers for what must not run in the trainer.

Each worker has a thread of the pool, which gives it items and waits for what comes of them. A worker is a process beside the trainer
(``LocalWorker``) or an actor in a Ray cluster (``ray_pool``). One that ends, or holds an item for longer than allowed, is replaced.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from threading import Condition, Lock, Thread, current_thread
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.frames import encode, pack
from rlhf_mcore.rewards.pools import MAX_LOST_IN_A_ROW, Collect, NoResults, Outcome, WorkerLimits
from rlhf_mcore.rewards.process import START_TIMEOUT_S, ProcessLost, WorkerProcess

MAX_CHUNK = 32  # items that a worker is given at a time
ASK = b"null"  # an item that asks what was loaded; see ``worker.serve``


class Interrupted(Exception):
    """Nobody wants any more what a worker is at."""


class WorkerLost(Exception):
    """A worker that is no process beside this one is gone, with all that it was given."""


class PoolEnded(RuntimeError):
    """What a pool's workers run on is gone."""


class PoolWorker(Protocol):
    """What a thread of a pool gives its items to."""

    def load(self) -> None:
        """Start, and wait until it has loaded; nothing where it has.

        Raises:
            ConfigError: it cannot be loaded.
        """
        ...

    def answers(self, items: Sequence[bytes]) -> Iterator[Outcome]:
        """Yield the outcome of each item. One that is lost is the last; the others were not begun."""
        ...

    def interrupt(self) -> None:
        """Called by another thread: end what it is at, which raises ``Interrupted`` there."""
        ...

    def stop(self) -> None:
        """End it, whatever it is doing."""
        ...


class LocalWorker:
    """A process of this machine, which is started again after it has ended."""

    def __init__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> None:
        self._name, self._limits = name, limits
        self._order = encode({"load": load, "options": dict(options), "memory_bytes": limits.memory_bytes})
        self._process: WorkerProcess | None = None
        self._lock, self._interrupted = Lock(), False  # other threads interrupt

    def load(self) -> None:
        """See ``PoolWorker``."""
        if self._process is None or self._process.ending() is not None:
            self.stop()
            self._start()

    def answers(self, items: Sequence[bytes]) -> Iterator[Outcome]:
        """See ``PoolWorker``."""
        self.load()
        assert self._process is not None
        self._process.send(pack(b"[" + b",".join(items) + b"]"))
        for _ in items:
            try:
                message = self._receive(self._limits.timeout_s)
                if "lost" in message:
                    raise ProcessLost(f"{message['lost']} (reward.memory_gib={self._limits.memory_gib:g})")
            except ProcessLost as lost:
                late = f"gave no result within reward.timeout_s={self._limits.timeout_s:g} s"
                yield Outcome(lost=self._end(late if lost.timed_out else lost.cause), timed_out=lost.timed_out)
                return
            yield Outcome(message)

    def interrupt(self) -> None:
        """See ``PoolWorker``. The process ends with its connection."""
        with self._lock:
            self._interrupted = True
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
            if self._process is not None and not self._interrupted:
                return self._process.receive(timeout_s)
        except ProcessLost:
            if not self._interrupted:
                raise
        self.stop()
        self._interrupted = False
        raise Interrupted

    def _end(self, cause: str) -> str:
        """End a process that is lost. Returns the cause, with what the process last printed."""
        tail = self._process.tail.strip() if self._process is not None else ""
        self.stop()
        return f"{cause}; it last printed: {tail!r}" if tail else cause


@dataclass(eq=False, slots=True)
class _Job:
    """The items of a call."""

    items: Sequence[bytes]
    stop_at_failure: bool
    outcomes: list[Outcome | None]
    unfinished: int
    tries: Counter[int] = field(default_factory=Counter)  # by item, which have failed
    error: BaseException | None = None
    is_over: bool = False


_Item = tuple[_Job, int]


class _Threads:
    """The threads of a pool, one for each worker. They do not hold the pool itself, which is closed when nobody else does."""

    def __init__(self, name: str, limits: WorkerLimits, make_worker: Callable[[], PoolWorker]) -> None:
        self._name, self._limits, self._make_worker = name, limits, make_worker
        self._changed = Condition()  # of what follows, and of jobs
        self._jobs: set[_Job] = set()
        self._waiting: deque[_Item] = deque()
        self._threads: dict[Thread, PoolWorker] = {}
        self._current: dict[PoolWorker, _Job] = {}  # of the item that a worker is at
        self._idle = 0  # threads that wait for items
        self._lost_in_a_row = 0
        self._closed = False

    def submit(self, items: Sequence[bytes], stop_at_failure: bool) -> Collect:
        """Begin with items. As many workers are started as there are items for."""
        job = _Job(items, stop_at_failure, [None] * len(items), len(items), is_over=not items)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the workers of {self._name} are closed")
            if items:
                self._jobs.add(job)
            self._waiting.extend((job, index) for index in range(len(items)))
            missing = min(self._limits.workers - len(self._threads), len(self._waiting) - self._idle)
            for _ in range(missing):
                worker = self._make_worker()
                thread = Thread(target=self._serve, args=(worker,), name="reward-pool", daemon=True)
                self._threads[thread] = worker
                thread.start()
            self._changed.notify_all()
        return lambda: self._wait(job)

    def close(self) -> None:
        """End the workers. Who still waits gets an error."""
        with self._changed:
            self._closed = True
            self._fail_all(RuntimeError(f"the workers of {self._name} were closed"))
            threads = list(self._threads)
            for worker in self._threads.values():
                worker.interrupt()
        for thread in threads:
            if thread is not current_thread():
                thread.join()

    def _wait(self, job: _Job) -> list[Outcome | None]:
        try:
            with self._changed:
                self._changed.wait_for(lambda: job.is_over)
        except BaseException:  # Ctrl-C: nobody will ask again
            with self._changed:
                self._end_job(job)
            raise
        if job.error is not None:
            raise job.error
        return job.outcomes

    # ------------------------------------------------------------------------------------------- with the lock held
    def _finish(self, job: _Job, index: int, outcome: Outcome) -> None:
        if job.is_over:
            return
        job.outcomes[index] = outcome
        job.unfinished -= 1
        self._lost_in_a_row = self._lost_in_a_row + 1 if outcome.lost else 0
        if not job.unfinished or (job.stop_at_failure and outcome.problem):
            self._end_job(job)
        if self._limits.retries and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            text = (
                f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last of them it {outcome.lost}: "
                "correct it, or give it more with reward.timeout_s and reward.memory_gib"
            )
            self._fail_all(NoResults(text, outcome.timed_out))

    def _end_job(self, job: _Job, error: BaseException | None = None) -> None:
        """Let go who waits for a job, and the workers that are at it."""
        job.is_over, job.error = True, error
        self._jobs.discard(job)
        if job.unfinished:
            self._waiting = deque(item for item in self._waiting if item[0] is not job)
        for worker, current in self._current.items():
            if current is job:
                worker.interrupt()
        self._changed.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        for job in list(self._jobs):
            self._end_job(job, error)
        self._changed.notify_all()

    def _put_back(self, items: Iterable[_Item]) -> None:
        self._waiting.extendleft(reversed([item for item in items if not item[0].is_over]))
        self._changed.notify_all()

    def _may_try_again(self, job: _Job, index: int) -> bool:
        job.tries[index] += 1
        return job.tries[index] <= self._limits.retries and not job.is_over

    # --------------------------------------------------------------------------------------------- in a worker's thread
    def _serve(self, worker: PoolWorker) -> None:
        try:
            while not self._closed:
                with suppress(Interrupted):
                    self._load(worker)
                    self._work(worker, self._take(worker))
        except ConfigError as error:
            with self._changed:
                self._fail_all(error)
        except WorkerLost:
            pass  # while others are there
        except BaseException as error:  # no Ray any more, or a mistake of ours: nobody may wait for ever
            with self._changed:
                self._closed, ended = True, isinstance(error, PoolEnded)
                self._fail_all(error if ended else RuntimeError(f"the pool of {self._name} failed: {error!r}"))
            if not ended:
                raise
        finally:
            worker.stop()
            with self._changed:
                self._threads.pop(current_thread(), None)

    def _load(self, worker: PoolWorker) -> None:
        try:
            worker.load()
        except WorkerLost as lost:
            if len(self._threads) > 1:
                raise
            raise ConfigError(f"{self._name} {lost}") from lost

    def _take(self, worker: PoolWorker) -> list[_Item]:
        """Wait for items; none comes once the pool is closed."""
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            finally:
                self._idle -= 1
            most = max(1, min(MAX_CHUNK, len(self._waiting) // (4 * self._limits.workers)))
            items = list(islice(self._waiting, most))
            if any(job.tries[index] for job, index in items):
                items = items[:1]  # what was lost once takes no other along
            for _ in items:
                self._waiting.popleft()
            self._set_current(worker, items)
            return items

    def _set_current(self, worker: PoolWorker, items: Sequence[_Item]) -> None:
        self._current.pop(worker, None)
        if items:
            self._current[worker] = items[0][0]

    def _work(self, worker: PoolWorker, items: Sequence[_Item]) -> None:
        """Have a worker answer items. One whose process was lost is tried again alone, the others behind it go to any worker."""
        left, again = deque(items), None
        try:
            for outcome in worker.answers([job.items[index] for job, index in items]):
                with self._changed:
                    item = left.popleft()
                    if outcome.lost and self._may_try_again(*item):
                        again = item
                    else:
                        self._set_current(worker, left)
                        self._finish(*item, outcome)
        except WorkerLost as lost:
            with self._changed:
                self._set_current(worker, ())
                outcome = Outcome(lost=str(lost))
                for item in [item for item in left if not self._may_try_again(*item)]:
                    left.remove(item)
                    self._finish(*item, outcome)
        finally:
            with self._changed:
                self._set_current(worker, [again] if again else ())
                self._put_back(left)
        if again is not None:
            self._work(worker, [again])


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
        """Begin with items, from any thread; see :class:`rlhf_mcore.rewards.pools.Pool`.

        What is returned raises ConfigError where nothing can be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        return self._threads.submit(items, stop_at_failure)


def _close(threads: _Threads, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        threads.close()
