"""Workers on the machines of a Ray cluster, those without a GPU among them.

A Ray actor holds a pool of one worker (``rlhf_mcore.rewards.pool``), so that a function is run there as it is here: in a process group
of its own, with its deadline, its memory limit and few variables. An actor that ends, or a machine that is lost, is replaced, and
what it held is tried elsewhere.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.pool import Job, Keeper, Outcome, PoolEnded, WorkerLimits, WorkerPool
from rlhf_mcore.rewards.process import START_TIMEOUT_S

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

    def __call__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        """A pool whose workers are actors."""
        return WorkerPool(name, load, options, limits, partial(RayKeeper, self))

    def host(self, *arguments: Any) -> Any:
        """An actor that holds a :class:`Host`. It starts when Ray has room for it."""
        import ray

        return ray.remote(Host).options(num_cpus=self._cpus, max_restarts=0, max_task_retries=0).remote(*arguments)


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
class _Actor:
    """An actor, with what it was given and has not answered yet."""

    actor: Any
    deadline: float
    ready: bool = False
    held: deque[tuple[Job, int]] = field(default_factory=deque)


class RayKeeper(Keeper[_Actor]):
    """Workers are actors, each of which answers its items together."""

    def __init__(self, pools: RayPools, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> None:
        super().__init__(name, limits)
        self._pools = pools
        own = asdict(replace(limits, workers=1, retries=0))  # what is lost there is tried again elsewhere
        variables = {name: os.environ[name] for name in limits.env if name in os.environ}
        self._arguments = (name, load, dict(options), own, os.getcwd(), variables)
        self._events: deque[tuple[_Actor, Future[Any]]] = deque()

    def _start(self) -> _Actor:
        worker = _Actor(self._pools.host(*self._arguments), time.monotonic() + START_TIMEOUT_S)
        self._workers.append(worker)
        self._call(worker, worker.actor.check.remote())
        return worker

    def _stop(self, worker: _Actor) -> None:
        import ray

        with suppress(Exception):  # the actor may be gone
            # At the end of a process Ray would start another cluster, to look for it there.
            if ray.is_initialized():
                ray.kill(worker.actor)

    def _call(self, worker: _Actor, reference: Any) -> None:
        def note(future: Future[Any]) -> None:
            self._events.append((worker, future))
            self._wake()

        reference.future().add_done_callback(note)

    def _free(self) -> _Actor | None:
        """One that has loaded: until then Ray may have no room for it. As many are started as there are items."""
        idle = next((worker for worker in self._workers if worker.ready and not worker.held), None)
        starting = sum(not worker.ready for worker in self._workers)
        wanted = sum(len(job.waiting) for job in self._jobs) - starting
        for _ in range(min(self._limits.workers - len(self._workers), wanted)):
            self._start()
        return idle

    def _give(self, worker: _Actor, pairs: Sequence[tuple[Job, int]]) -> None:
        worker.held = deque(pairs)
        worker.deadline = time.monotonic() + len(pairs) * self._limits.timeout_s + START_TIMEOUT_S
        self._call(worker, worker.actor.run.remote([job.items[index] for job, index in pairs]))

    def _try_again(self, job: Job, index: int) -> None:
        job.waiting.appendleft(index)

    def _wait(self) -> None:
        if not self._events and not self._closing:
            poll = select.poll()
            poll.register(self._alarm, select.POLLIN)
            poll.poll(1000 * _LOOK_S)
        while self._events:
            worker, future = self._events.popleft()
            if worker in self._workers:
                self._take(worker, future)
        if problem := self._pools.connection.problem():
            raise PoolEnded(f"{self._name}: {problem}; start the run again")
        self._look_at_deadlines()

    def _take(self, worker: _Actor, future: Future[Any]) -> None:
        """What an actor has answered, or that it has ended."""
        if future.exception() is not None:
            self._lose(worker, f"lost its Ray actor ({str(future.exception()).strip().splitlines()[0][:200]})")
            return
        if isinstance(problem := future.result(), str):
            self._discard(worker)
            raise ConfigError(problem)
        if not worker.ready:
            worker.ready = True
            self._has_loaded()
            return
        held, worker.held = worker.held, deque()
        for (job, index), (answer, lost, timed_out) in zip(held, future.result(), strict=True):
            (self._lost if lost else self._answered)(job, index, Outcome(answer, lost, timed_out))

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

    def _lose(self, worker: _Actor, cause: str) -> None:
        self._discard(worker)
        if worker.held:
            sys.stderr.write(f"{self._name} {cause}; {len(worker.held)} responses go to another one\n")
        elif not worker.ready and not self._workers and self._loading:
            raise ConfigError(f"{self._name} {cause} while it was loaded; look at Ray's logs")
        for job, index in reversed(worker.held):
            self._lost(job, index, Outcome(lost=cause))
