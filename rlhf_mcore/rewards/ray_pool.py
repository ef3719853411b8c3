"""Workers on the machines of a Ray cluster, those without a GPU among them.

A Ray actor holds a worker process (``rlhf_mcore.rewards.pool.LocalWorker``), so that a function is run there as it is here: in a
process group of its own, with its deadline, its memory limit and few variables. A lost actor or machine is
replaced, and its item is tried elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from threading import Event
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import START_TIMEOUT_S
from rlhf_mcore.rewards.pool import Interrupted, LocalWorker, Outcome, PoolEnded, WorkerLimits, WorkerLost, WorkerPool

_LOOK_S = 1.0  # between two looks at deadlines and at Ray


class RayPools:
    """Makes the pools of a rank.

    Args:
        problem: why there is no Ray any more, or None.
        cpus: that Ray counts for each worker.
    """

    def __init__(self, problem: Callable[[], str | None], cpus: float = 1.0) -> None:
        self.problem, self._cpus = problem, cpus

    def __call__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        """Make a pool whose workers are actors."""
        variables = {name: os.environ[name] for name in limits.env if name in os.environ}
        arguments = (name, load, dict(options), asdict(limits), os.getcwd(), variables)
        worker = partial(RayWorker, name, limits, self.problem, partial(self._start, *arguments))
        return WorkerPool(name, load, options, limits, worker)

    def _start(self, *arguments: Any) -> Any:
        """Create an actor that holds a :class:`Host`. It starts when Ray has room for it."""
        import ray

        return ray.remote(Host).options(num_cpus=self._cpus, max_restarts=0, max_task_retries=0).remote(*arguments)


class Host:
    """The state of an actor. It starts where Ray puts it, in the trainer's working directory if that is there."""

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
        self._worker = LocalWorker(name, load, options, WorkerLimits(**{**limits, "env": tuple(limits["env"])}))

    def load(self) -> str | None:
        """Load; returns why nothing can be loaded, or None."""
        try:
            self._worker.load()
        except ConfigError as error:
            return str(error)
        return None

    def answer(self, item: bytes) -> tuple[dict[str, Any], str, bool] | str:
        """Return the fields of an item's outcome, or why nothing can be loaded."""
        try:
            outcome = self._worker.answer(item)
        except ConfigError as error:
            return str(error)
        return outcome.answer, outcome.lost, outcome.timed_out


class RayWorker:
    """An actor, which is started again after it was lost.

    Args:
        name: what is loaded, for messages.
        limits: of the pool.
        problem: why there is no Ray any more, or None.
        start: creates an actor.
    """

    def __init__(
        self, name: str, limits: WorkerLimits, problem: Callable[[], str | None], start: Callable[[], Any]
    ) -> None:
        self._name, self._limits, self._problem, self._start = name, limits, problem, start
        self._actor: Any = None
        self._changed, self.interrupted = Event(), False

    def load(self) -> None:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        if self._actor is not None:
            return
        late = f"got no worker of Ray within {START_TIMEOUT_S:g} s; give Ray more cores, or set reward.ray.cpus_per_worker lower"
        for is_last in (False, True):
            self._actor = self._start()
            try:
                problem = self._get(self._actor.load.remote(), START_TIMEOUT_S, late)
                break
            except WorkerLost as lost:
                if str(lost) == late:
                    raise
                if is_last:
                    raise WorkerLost(f"{lost} while it was loaded; look at Ray's logs") from lost
        if problem is not None:
            raise ConfigError(problem)

    def answer(self, item: bytes) -> Outcome:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        self.load()
        try:
            late = "lost its Ray actor, which does not answer"
            answer = self._get(self._actor.answer.remote(item), self._limits.timeout_s + START_TIMEOUT_S, late)
        except WorkerLost as lost:
            sys.stderr.write(f"{self._name} {lost}; its response goes to another one\n")
            raise
        if isinstance(answer, str):
            raise ConfigError(answer)
        return Outcome(*answer)

    def interrupt(self) -> None:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        self.interrupted = True
        self._changed.set()

    def stop(self) -> None:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        import ray

        actor, self._actor = self._actor, None
        with suppress(Exception):  # the actor may be gone
            # At the end of a process Ray would start another cluster, to look for it there.
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    def _get(self, reference: Any, timeout_s: float, late: str) -> Any:
        """Wait for the result of a call of the actor; end the actor if there is none."""
        future, deadline = reference.future(), time.monotonic() + timeout_s
        future.add_done_callback(lambda _: self._changed.set())
        try:
            while not future.done():
                if self.interrupted:
                    raise Interrupted
                if problem := self._problem():
                    raise PoolEnded(f"{self._name}: {problem}; start the run again")
                if time.monotonic() > deadline:
                    raise WorkerLost(late)
                self._changed.wait(_LOOK_S)
                self._changed.clear()
            return future.result()
        except (Interrupted, PoolEnded, WorkerLost):
            self.stop()
            raise
        except Exception as error:
            self.stop()
            if problem := self._problem():
                raise PoolEnded(f"{self._name}: {problem}; start the run again") from error
            raise WorkerLost(f"lost its Ray actor ({str(error).strip().splitlines()[0][:200]})") from error
