"""A pool whose workers are on the machines of a Ray cluster, those without a GPU among them.

A Ray actor holds a pool of one worker (``rlhf_mcore.rewards.pool``), so that a function is run there as it is here: in a process group
of its own, with its deadline, its memory limit and few variables. An actor that ends, or a machine that is lost, is replaced, and
what it held is tried elsewhere.
"""

from __future__ import annotations

import os
import queue
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from threading import Lock, Thread, current_thread
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.pool import (
    MAX_CHUNK,
    MAX_LOST_IN_A_ROW,
    START_TIMEOUT_S,
    Job,
    Outcome,
    WorkerLimits,
    WorkerPool,
)

_LOOK_S = 1.0  # between two looks at deadlines and at Ray


class Connection(Protocol):
    """A cluster that this process has joined."""

    def problem(self) -> str | None:
        """Why there is no Ray any more."""
        ...


class RayPools:
    """Makes the pools of a rank. ``cpus`` is what Ray counts for each worker."""

    def __init__(self, connection: Connection, cpus: float = 1.0) -> None:
        self.connection, self._cpus = connection, cpus

    def __call__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> RayPool:
        """A pool, as :class:`rlhf_mcore.rewards.pool.WorkerPool` is."""
        return RayPool(_Keeper(name, load, options, limits, self))

    def host(self, *arguments: Any) -> Any:
        """An actor that holds a :class:`Host`. It starts when Ray has room for it."""
        import ray

        return ray.remote(Host).options(num_cpus=self._cpus, max_restarts=0, max_task_retries=0).remote(*arguments)


class RayPool:
    """Runs items on workers that are started in a cluster when there is something to do."""

    def __init__(self, keeper: _Keeper) -> None:
        self._keeper = keeper
        self.close = weakref.finalize(self, _close, keeper, os.getpid())

    def check(self) -> None:
        """Start a worker, so that what cannot be loaded is found now.

        Raises:
            ConfigError: it cannot be loaded, or there is no Ray.
        """
        self._keeper.submit([], False, loads=True).outcomes()

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Job:
        """As that of :class:`rlhf_mcore.rewards.pool.WorkerPool`."""
        return self._keeper.submit(items, stop_at_failure)


class Host:
    """What an actor holds. It starts where Ray puts it, in the trainer's working directory if that is there."""

    def __init__(
        self,
        name: str,
        load: str,
        options: Mapping[str, Any],
        limits: Mapping[str, Any],
        directory: str,
        variables: Mapping[str, str],
    ) -> None:
        with suppress(OSError):
            os.chdir(directory)
        os.environ.update(variables)
        self._pool = WorkerPool(name, load, options, WorkerLimits(**{**limits, "env": tuple(limits["env"])}))

    def check(self) -> str | None:
        """Why nothing can be loaded, or None."""
        try:
            self._pool.check()
        except ConfigError as error:
            return str(error)
        return None

    def run(self, items: Sequence[bytes]) -> list[tuple[dict[str, Any], str, bool]] | str:
        """The fields of an outcome for each item, or why nothing can be loaded."""
        try:
            outcomes = self._pool.run(items)
        except ConfigError as error:
            return str(error)
        return [(found.answer, found.lost, found.timed_out) for found in outcomes if found is not None]


@dataclass(eq=False, slots=True)
class _Worker:
    """An actor, with what it was given and has not answered yet."""

    actor: Any
    deadline: float
    ready: bool = False
    held: list[tuple[Job, int]] = field(default_factory=list)


class _Keeper:
    """The thread of a pool: it alone knows the actors."""

    def __init__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits, pools: RayPools) -> None:
        self._name, self._limits, self._pools = name, limits, pools
        own = asdict(replace(limits, workers=1, retries=0))  # what is lost there is tried again elsewhere
        variables = {name: os.environ[name] for name in limits.env if name in os.environ}
        self._arguments = (name, load, dict(options), own, os.getcwd(), variables)
        self._events: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._jobs: list[Job] = []
        self._loading: list[Job] = []
        self._lost_in_a_row = 0
        self._thread: Thread | None = None
        self._closing = False
        self._lock = Lock()

    def submit(self, items: Sequence[bytes], stop_at_failure: bool, loads: bool = False) -> Job:
        job = Job(items, stop_at_failure, lambda: self._events.put(()))
        if not items and not loads:
            job.end()
            return job
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the workers of {self._name} are closed")
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="reward-ray", daemon=True)
                self._thread.start()
            self._events.put((self._loading if loads else self._jobs, job))
        return job

    def close(self) -> None:
        """End the actors. Who still waits is told so."""
        with self._lock:
            self._closing, thread = True, self._thread
        self._events.put(())
        if thread is not None and thread is not current_thread():
            thread.join()

    # ------------------------------------------------------------------------------------------ in the pool's own thread
    def _serve(self) -> None:
        try:
            while not self._closing:
                try:
                    self._take_events()
                    if problem := self._pools.connection.problem():
                        raise RuntimeError(f"{self._name}: {problem}; start the run again")
                    self._look_at_deadlines()
                    for job in self._jobs:
                        self._give_out(job)
                    self._end_jobs()
                except ConfigError as error:
                    self._fail_all(error)
            self._fail_all(RuntimeError(f"the workers of {self._name} were closed"))
        except Exception as error:  # no Ray, or a mistake of ours: nobody may wait for ever
            self._closing = True
            self._take_events(0)
            self._fail_all(error)
        finally:
            while self._workers:
                self._discard(self._workers[0])

    def _take_events(self, timeout_s: float = _LOOK_S) -> None:
        """Everything that has happened; waits for something, but no longer than a while."""
        with suppress(queue.Empty):
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                self._handle(*event)
                event = self._events.get_nowait()

    def _handle(self, where: Any = None, what: Any = None, *_: Any) -> None:
        if isinstance(where, list):
            where.append(what)
            if where is self._loading:
                self._load()
        elif isinstance(where, _Worker) and where in self._workers:
            self._take(where, what)

    def _load(self) -> None:
        if any(worker.ready for worker in self._workers):
            while self._loading:
                self._loading.pop().end()
        elif not self._workers:
            self._start()

    def _start(self) -> _Worker:
        worker = _Worker(self._pools.host(*self._arguments), time.monotonic() + START_TIMEOUT_S)
        self._workers.append(worker)
        self._call(worker, worker.actor.check.remote())
        return worker

    def _call(self, worker: _Worker, reference: Any) -> None:
        reference.future().add_done_callback(lambda future: self._events.put((worker, future)))

    def _discard(self, worker: _Worker) -> None:
        import ray

        self._workers.remove(worker)
        with suppress(Exception):  # the actor may be gone
            # At the end of a process Ray would start another cluster, to look for it there.
            if ray.is_initialized():
                ray.kill(worker.actor)

    def _give_out(self, job: Job) -> None:
        chunk = max(1, min(MAX_CHUNK, len(job.items) // (4 * self._limits.workers)))
        while job.waiting and not job.is_over:
            idle = next((worker for worker in self._workers if worker.ready and not worker.held), None)
            if idle is None:
                starting = sum(not worker.ready for worker in self._workers)
                if len(self._workers) < self._limits.workers and starting * chunk < len(job.waiting):
                    self._start()
                    continue
                return
            number = 1 if job.tries[job.waiting[0]] else chunk  # what was lost once is alone now
            indices = [job.waiting.popleft() for _ in range(min(number, len(job.waiting)))]
            idle.held = [(job, index) for index in indices]
            idle.deadline = time.monotonic() + len(indices) * self._limits.timeout_s + START_TIMEOUT_S
            self._call(idle, idle.actor.run.remote([job.items[index] for index in indices]))

    def _take(self, worker: _Worker, future: Future[Any]) -> None:
        """What an actor has answered, or that it has ended."""
        if future.exception() is not None:
            self._lose(worker, f"lost its Ray actor ({str(future.exception()).strip().splitlines()[0][:200]})")
            return
        if isinstance(problem := future.result(), str):
            raise ConfigError(problem)
        if not worker.ready:
            worker.ready = True
            while self._loading:
                self._loading.pop().end()
            return
        held, worker.held = worker.held, []
        for (job, index), (answer, lost, timed_out) in zip(held, future.result(), strict=True):
            if lost:
                self._try_again(job, index, Outcome(answer, lost, timed_out))
            else:
                self._lost_in_a_row = 0
                job.finish(index, Outcome(answer))

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        for worker in [
            worker for worker in self._workers if now > worker.deadline and (worker.held or not worker.ready)
        ]:
            if worker.ready:
                self._lose(worker, "lost its Ray actor, which does not answer")
                continue
            self._discard(worker)
            if not self._workers:
                raise ConfigError(
                    f"{self._name}: Ray has started no worker within {START_TIMEOUT_S:g} s; give Ray more cores, or set "
                    "reward.ray.cpus_per_worker lower"
                )

    def _lose(self, worker: _Worker, cause: str) -> None:
        self._discard(worker)
        if worker.held:
            sys.stderr.write(f"{self._name} {cause}; {len(worker.held)} responses go to another one\n")
        elif not worker.ready and not self._workers and self._loading:
            raise ConfigError(f"{self._name} {cause} while it was loaded; look at Ray's logs")
        for job, index in reversed(worker.held):
            self._try_again(job, index, Outcome(lost=cause))

    def _try_again(self, job: Job, index: int, outcome: Outcome) -> None:
        """Elsewhere, or never."""
        job.tries[index] += 1
        if job.tries[index] <= self._limits.retries:
            job.waiting.appendleft(index)
            return
        job.finish(index, outcome)
        self._lost_in_a_row += 1
        if self._limits.retries and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            raise ConfigError(
                f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row; for the last of them it {outcome.lost}: "
                "correct it, or give it more with reward.timeout_s and reward.memory_gib"
            )

    def _end_jobs(self) -> None:
        for job in [job for job in self._jobs if job.is_over]:
            self._jobs.remove(job)
            job.waiting = deque()
            job.end()

    def _fail_all(self, error: Exception) -> None:
        waiting = [*self._jobs, *self._loading]
        self._jobs.clear()
        self._loading.clear()
        for job in waiting:
            job.abandoned = True
            job.end(error)


def _close(keeper: _Keeper, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        keeper.close()
