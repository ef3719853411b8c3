"""Workers on the machines of a Ray cluster, including machines without a GPU.

A Ray actor contains a worker process (``rlhf_mcore.rewards.pool.LocalWorker``). The function therefore runs as on this machine,
with its own process group, deadline, memory limit and a small environment. A lost actor or machine is replaced, and its
item is retried on another worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import START_TIMEOUT_S
from rlhf_mcore.rewards.pool import LocalWorker, Outcome, PoolEnded, WorkerLimits, WorkerLost, WorkerPool

_LOOK_S = 1.0  # seconds between checks of deadlines and of Ray


class RayPools:
    """Builds the pools of a rank.

    Args:
        problem: returns why Ray is gone, or None.
        cpus: CPUs that Ray reserves per worker.
    """

    def __init__(self, problem: Callable[[], str | None], cpus: float = 1.0) -> None:
        self.problem, self._cpus = problem, cpus

    def __call__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        """Build a pool whose workers are actors."""
        variables = {name: os.environ[name] for name in limits.env if name in os.environ}
        arguments = (name, load, dict(options), asdict(limits), os.getcwd(), variables)
        worker = partial(RayWorker, name, limits, self.problem, partial(self._start, *arguments))
        return WorkerPool(name, load, options, limits, worker)

    def _start(self, *arguments: Any) -> Any:
        """Create an actor that contains a :class:`Host`. It starts when Ray has capacity for it."""
        import ray

        return ray.remote(Host).options(num_cpus=self._cpus, max_restarts=0, max_task_retries=0).remote(*arguments)


class Host:
    """The state of an actor. It uses the trainer's working directory if that exists on the machine that Ray chooses."""

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

    async def load(self) -> str | None:
        """Load the function. Return the problem, or None."""
        try:
            await self._worker.load()
        except ConfigError as error:
            return str(error)
        return None

    async def answer(self, item: bytes) -> tuple[dict[str, Any], str, bool] | str:
        """Return the fields of an item's outcome, or the problem if the function cannot be loaded."""
        try:
            outcome = await self._worker.answer(item)
        except ConfigError as error:
            return str(error)
        return outcome.answer, outcome.lost, outcome.timed_out


class RayWorker:
    """An actor, which is restarted after a loss.

    Args:
        name: name of the function, for messages.
        limits: limits of the pool.
        problem: returns why Ray is gone, or None.
        start: creates an actor.
    """

    def __init__(
        self, name: str, limits: WorkerLimits, problem: Callable[[], str | None], start: Callable[[], Any]
    ) -> None:
        self._name, self._limits, self._problem, self._start = name, limits, problem, start
        self._actor: Any = None

    async def load(self) -> None:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        if self._actor is not None:
            return
        late = (
            f"got no Ray worker within {START_TIMEOUT_S:g} s; give Ray more cores, or lower reward.ray.cpus_per_worker"
        )
        for is_last in (False, True):
            self._actor = self._start()
            try:
                problem = await self._get(self._actor.load.remote(), START_TIMEOUT_S, late)
                break
            except WorkerLost as lost:
                if str(lost) == late:
                    raise
                if is_last:
                    raise WorkerLost(f"{lost} while it was loaded; check Ray's logs") from lost
        if problem is not None:
            raise ConfigError(problem)

    async def answer(self, item: bytes) -> Outcome:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        await self.load()
        try:
            late = "lost its Ray actor, which does not answer"
            answer = await self._get(self._actor.answer.remote(item), self._limits.timeout_s + START_TIMEOUT_S, late)
        except WorkerLost as lost:
            sys.stderr.write(f"{self._name} {lost}; another worker scores its response\n")
            raise
        if isinstance(answer, str):
            raise ConfigError(answer)
        return Outcome(*answer)

    def stop(self) -> None:
        """See ``rlhf_mcore.rewards.pool.PoolWorker``."""
        import ray

        actor, self._actor = self._actor, None
        with suppress(Exception):  # the actor may be gone
            # At process exit, ray.kill would otherwise start a new cluster to search for the actor.
            if actor is not None and ray.is_initialized():
                ray.kill(actor)

    async def _get(self, reference: Any, timeout_s: float, late: str) -> Any:
        """Wait for the result of an actor call. Stop the actor if there is no result."""
        future, deadline = asyncio.wrap_future(reference.future()), time.monotonic() + timeout_s
        try:
            while not future.done():
                if problem := self._problem():
                    raise PoolEnded(f"{self._name}: {problem}; start the run again")
                if time.monotonic() > deadline:
                    raise WorkerLost(late)
                await asyncio.wait([future], timeout=_LOOK_S)
            return future.result()
        except (PoolEnded, WorkerLost):
            self.stop()
            raise
        except Exception as error:
            self.stop()
            if problem := self._problem():
                raise PoolEnded(f"{self._name}: {problem}; start the run again") from error
            raise WorkerLost(f"lost its Ray actor ({str(error).strip().splitlines()[0][:200]})") from error
