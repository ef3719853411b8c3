"""Pools of workers for what must not run in the trainer.

A pool gives items to workers that have all loaded the same thing, and replaces those that end or hold an item for longer than allowed.
What a worker is depends on the pool's backend: a process beside the trainer (here) or an actor in a Ray cluster (``ray_pool``).
"""

from __future__ import annotations

import math
import os
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Event, Lock, Thread, current_thread
from typing import Any, Generic, Protocol, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.frames import FrameError, encode, pack
from rlhf_mcore.rewards.process import START_TIMEOUT_S, Worker

MAX_LOST_IN_A_ROW = 10  # after so many items without an answer, the others would be waited for in vain
MAX_WORKERS = 8  # by default; a function that waits for a server wants more
MAX_CHUNK = 32  # items that a worker is given at a time
QUICK_S = 0.05  # a worker whose items take less than this is given more before it has none: nothing waits for long behind another


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a pool may use."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # of each worker
    env: tuple[str, ...] = ()  # names of variables that workers get beside ``ENVIRONMENT``
    retries: int = 1  # of an item whose worker has ended or was killed, each on a fresh one


def default_workers(engines: int = 1) -> int:
    """This rank's, or one engine's, share of the cores of its machine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdecimal() else 1, engines, 1)
    return max(1, min(MAX_WORKERS, share))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of an item: the worker's answer, or why there is none."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False


class NoResults(ConfigError):
    """So many responses in a row got no result that more would get none. ``timed_out``: the last of them took too long."""

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Job:
    """The items of a call, on their way through a pool."""

    def __init__(self, items: Sequence[bytes], stop_at_failure: bool, wake: Callable[[], None]) -> None:
        self.items, self.waiting = items, deque(range(len(items)))
        self.results: list[Outcome | None] = [None] * len(items)
        self.tries: Counter[int] = Counter()
        self.unfinished, self.stop_at_failure = len(items), stop_at_failure
        self.error: Exception | None = None
        self.abandoned = False
        self._done, self._wake = Event(), wake

    def outcomes(self) -> list[Outcome | None]:
        """Wait. One outcome per item, in order.

        Raises:
            ConfigError: nothing can be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        try:
            self._done.wait()
        except BaseException:  # Ctrl-C: nobody will ask again
            self.abandoned = True
            self._wake()
            raise
        if self.error is not None:
            raise self.error
        return self.results

    def finish(self, index: int, outcome: Outcome) -> None:
        """Called by the pool: what has come of an item."""
        self.results[index] = outcome
        self.unfinished -= 1
        self.abandoned |= self.stop_at_failure and (bool(outcome.lost) or "error" in outcome.answer)

    def end(self, error: Exception | None = None) -> None:
        """Called by the pool: no more comes."""
        self.error = error
        self._done.set()

    @property
    def is_over(self) -> bool:
        return self.abandoned or not self.unfinished


class Held(Protocol):
    """What every backend's worker has."""

    ready: bool  # it has loaded
    held: deque[tuple[Job, int]]  # items that it was given and has not answered


WorkerT = TypeVar("WorkerT", bound=Held)


class PoolEnded(RuntimeError):
    """What a pool's workers run on is gone."""


class Keeper(ABC, Generic[WorkerT]):
    """The thread of a pool: it alone knows the workers. Items are worked on while the trainer does something else."""

    def __init__(self, name: str, limits: WorkerLimits) -> None:
        self._name, self._limits = name, limits
        self._workers: list[WorkerT] = []
        self._jobs: list[Job] = []
        self._new: deque[tuple[Job, bool]] = deque()
        self._loading: list[Job] = []  # wait for the first worker that has loaded
        self._lost_in_a_row = 0
        self._thread: Thread | None = None
        self._closing = False
        self._lock = Lock()  # of ``_new``, ``_thread`` and ``_closing``
        self._alarm = -1

    def submit(self, items: Sequence[bytes], stop_at_failure: bool, loads: bool = False) -> Job:
        """Called from any thread: begin with items, or with loading."""
        job = Job(items, stop_at_failure, self._wake)
        if not items and not loads:
            job.end()
            return job
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the workers of {self._name} are closed")
            self._new.append((job, loads))
            if self._thread is None:
                self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = Thread(target=self._serve, name="reward-pool", daemon=True)
                self._thread.start()
            os.eventfd_write(self._alarm, 1)
        return job

    def close(self) -> None:
        """End the workers. Who still waits is told so."""
        with self._lock:
            self._closing, thread = True, self._thread
            if thread is not None:
                os.eventfd_write(self._alarm, 1)
        if thread is not None and thread is not current_thread():
            thread.join()
            os.close(self._alarm)

    def _wake(self) -> None:
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._alarm, 1)

    # ------------------------------------------------------------------------------------------ in the pool's own thread
    @abstractmethod
    def _start(self) -> WorkerT:
        """A further worker, which begins to load."""

    @abstractmethod
    def _stop(self, worker: WorkerT) -> None:
        """End a worker, whatever it is doing."""

    @abstractmethod
    def _free(self) -> WorkerT | None:
        """A worker that may be given items, maybe a new one."""

    @abstractmethod
    def _give(self, worker: WorkerT, pairs: Sequence[tuple[Job, int]]) -> None:
        """Send it items."""

    @abstractmethod
    def _wait(self) -> None:
        """Until something has happened, and take note of it."""

    @abstractmethod
    def _try_again(self, job: Job, index: int) -> None:
        """An item that was lost."""

    def _forget_ended(self) -> None:
        """Workers that have ended while there was nothing to do."""

    def _serve(self) -> None:
        try:
            while not self._is_closing():
                try:
                    self._take_new()
                    self._give_out()
                    self._wait()
                    self._end_jobs()
                except ConfigError as error:
                    self._fail_all(error)
            self._fail_all(RuntimeError(f"the workers of {self._name} were closed"))
        except PoolEnded as error:
            self._closing = True
            self._fail_all(error)
        except BaseException as error:  # a mistake of ours: nobody may wait for ever
            self._closing = True
            self._fail_all(RuntimeError(f"the pool of {self._name} failed: {error!r}"))
            raise
        finally:
            while self._workers:
                self._discard(self._workers[-1])

    def _is_closing(self) -> bool:
        """The alarm is cleared before anything is looked at: what happens after that ends the next wait."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)
        return self._closing

    def _take_new(self) -> None:
        while self._new:
            job, loads = self._new.popleft()
            (self._loading if loads else self._jobs).append(job)
        self._forget_ended()
        if self._loading and any(worker.ready for worker in self._workers):
            self._has_loaded()
        elif self._loading and not self._workers:
            self._start()
        self._end_jobs()

    def _has_loaded(self) -> None:
        while self._loading:
            self._loading.pop().end()

    def _give_out(self) -> None:
        while waiting := sum(len(job.waiting) for job in self._jobs):
            worker = self._free()
            if worker is None:
                return
            chunk = max(1, min(MAX_CHUNK, waiting // (4 * self._limits.workers)))
            pairs = ((job, index) for job in self._jobs for index in job.waiting)
            given = list(islice(pairs, chunk))
            if any(job.tries[index] for job, index in given):
                given = given[:1]  # what was lost once takes no other along
            for job, _ in given:
                job.waiting.popleft()
            self._give(worker, given)

    def _end_jobs(self) -> None:
        for job in [job for job in self._jobs if job.is_over]:
            self._jobs.remove(job)
            for worker in [worker for worker in self._workers if worker.held and worker.held[0][0] is job]:
                self._discard(worker)  # nobody wants what it is at
                self._put_back([pair for pair in worker.held if pair[0] is not job])
            job.end()

    def _put_back(self, pairs: Sequence[tuple[Job, int]]) -> None:
        for job, index in reversed(pairs):
            job.waiting.appendleft(index)

    def _discard(self, worker: WorkerT) -> None:
        self._workers.remove(worker)
        self._stop(worker)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._jobs += [job for job, _ in self._new] + self._loading
            self._new.clear()
        self._loading.clear()
        for worker in [worker for worker in self._workers if worker.held]:
            self._discard(worker)
        while self._jobs:
            self._jobs.pop().end(error)

    def _lost(self, job: Job, index: int, outcome: Outcome) -> None:
        """An item has no answer: it is tried again, or never.

        Raises:
            NoResults: so did ``MAX_LOST_IN_A_ROW`` items in a row.
        """
        job.tries[index] += 1
        if job.tries[index] <= self._limits.retries:
            self._try_again(job, index)
            return
        job.finish(index, outcome)
        self._lost_in_a_row += 1
        if self._limits.retries and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            raise NoResults(
                f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last of them it {outcome.lost}: "
                "correct it, or give it more with reward.timeout_s and reward.memory_gib",
                outcome.timed_out,
            )

    def _answered(self, job: Job, index: int, outcome: Outcome) -> None:
        self._lost_in_a_row = 0
        job.finish(index, outcome)


class LocalKeeper(Keeper[Worker]):
    """Workers are processes of this machine."""

    def __init__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> None:
        super().__init__(name, limits)
        memory_bytes = int(min(limits.memory_gib * 2**30, 2.0**62))  # what a limit of the kernel can be
        self._order = encode({"load": load, "options": dict(options), "memory_bytes": memory_bytes})

    def _start(self) -> Worker:
        worker = Worker(self._order, self._limits.env)
        self._workers.append(worker)
        return worker

    def _stop(self, worker: Worker) -> None:
        worker.stop()

    def _forget_ended(self) -> None:
        for worker in self._workers[:]:
            if not worker.held and worker.ready and worker.ending() is not None:
                self._discard(worker)

    def _free(self) -> Worker | None:
        """A worker without items, maybe a new one; else one that is about to have none, where items are quick."""
        least = min(self._workers, key=lambda worker: len(worker.held), default=None)
        if least is not None and not least.held:
            return least
        if len(self._workers) < self._limits.workers:
            return self._start()
        now = time.monotonic()
        quick = (w for w in self._workers if len(w.held) == 1 and w.item_s < QUICK_S and now - w.since < QUICK_S)
        return next(quick, None)

    def _give(self, worker: Worker, pairs: Sequence[tuple[Job, int]]) -> None:
        worker.outgoing += pack(b"[" + b",".join(job.items[index] for job, index in pairs) + b"]")
        if worker.ready and not worker.held:
            worker.since = time.monotonic()
            worker.deadline = worker.since + self._limits.timeout_s
        worker.held.extend(pairs)

    def _try_again(self, job: Job, index: int) -> None:
        self._give(self._start(), [(job, index)])

    def _wait(self) -> None:
        if self._closing:  # the alarm that told so may just have been read
            return
        poll = select.poll()
        poll.register(self._alarm, select.POLLIN)
        for worker in self._workers:
            for descriptor, wanted in worker.interests():
                poll.register(descriptor, wanted)
        due = min((w.deadline for w in self._workers if w.held or not w.ready), default=math.inf) - time.monotonic()
        poll.poll(max(0, math.ceil(1000 * min(due, 60.0))))
        for worker in list(self._workers):
            ending = worker.ending()  # asked before the last messages are read, so that none is lost
            try:
                messages = worker.exchange()
            except FrameError as error:
                self._lose(worker, f"broke its connection ({error})")
                continue
            for message in messages:
                self._take(worker, message)
            if worker not in self._workers:
                continue
            if ending is not None:
                self._lose(worker, ending)
            elif (worker.held or not worker.ready) and time.monotonic() >= worker.deadline:
                self._lose(worker, "", timed_out=True)

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        began, worker.since = worker.since, time.monotonic()
        worker.deadline = worker.since + self._limits.timeout_s
        if "problem" in message:
            self._discard(worker)
            raise ConfigError(message["problem"])
        if "ready" in message:
            worker.ready = True
            self._has_loaded()
        elif "lost" in message:
            self._lose(worker, f"{message['lost']} (reward.memory_gib={self._limits.memory_gib:g})")
        elif worker.held:  # a child that a function has left behind may write, too
            if "batched" not in message:  # the answer to ``worker.ASK`` tells nothing of how quick the function is
                worker.item_s = worker.since - began
            self._answered(*worker.held.popleft(), Outcome(message))

    def _lose(self, worker: Worker, cause: str, timed_out: bool = False) -> None:
        """Kill a worker. The item that it was at is tried again alone on a fresh one, or is lost; the others wait."""
        self._discard(worker)
        tail = f"; it last printed: {worker.tail.strip()!r}" if worker.tail.strip() else ""
        if not worker.ready:
            cause = f"took longer than {START_TIMEOUT_S:g} s" if timed_out else cause
            raise ConfigError(f"{self._name} {cause} while it was loaded{tail}: correct the file")
        if timed_out:
            cause = f"gave no result within reward.timeout_s={self._limits.timeout_s:g} s"
        if not worker.held:
            return
        job, index = worker.held.popleft()
        self._put_back(list(worker.held))
        self._lost(job, index, Outcome(lost=cause + tail, timed_out=timed_out))


class WorkerPool:
    """Runs items on workers that have all loaded the same thing. Workers are started when there is something to do.

    Args:
        name: what is loaded, for messages.
        load, options: its name among ``worker.LOADERS``, and arguments.
        limits: how many workers, and what each of them may use.
        backend: what the workers are.
    """

    def __init__(
        self,
        name: str,
        load: str,
        options: Mapping[str, Any],
        limits: WorkerLimits,
        backend: Callable[[str, str, Mapping[str, Any], WorkerLimits], Keeper[Any]] = LocalKeeper,
    ) -> None:
        self._keeper = backend(name, load, options, limits)
        self.close = weakref.finalize(self, _close, self._keeper, os.getpid())

    def check(self) -> None:
        """Start a worker, so that what cannot be loaded is found now.

        Raises:
            ConfigError: it cannot be loaded.
        """
        self._keeper.submit([], False, loads=True).outcomes()

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Job:
        """Begin with items, each a JSON text. May be called from any thread, as often as wanted.

        With ``stop_at_failure`` the rest is left, as None, once an item is lost or its answer has an entry "error".
        """
        return self._keeper.submit(items, stop_at_failure)

    def run(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> list[Outcome | None]:
        """``submit``, and wait."""
        return self.submit(items, stop_at_failure=stop_at_failure).outcomes()


def _close(keeper: Keeper[Any], owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        keeper.close()
