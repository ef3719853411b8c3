"""Run rollouts as coroutines on an engine. The engine runs a pass when all coroutines wait for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.config.errors import shortened
from rlhf_mcore.coroutines import cancel_all
from rlhf_mcore.sampling.checks import REMEDY, LostTrajectory, check_completion

if TYPE_CHECKING:
    from rlhf_mcore.protocols import Generator
    from rlhf_mcore.types import Completion, Request

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Worker:
    """A coroutine of the loop. It is busy while ``num_waits`` is 0, and the engine waits for busy coroutines."""

    number: int  # in starting order
    num_waits: int = 0  # waits for the engine, or for coroutines that wait for the engine


_CURRENT: ContextVar[_Worker] = ContextVar("worker")


class EngineLoop:
    """Runs coroutines on the lead rank of an engine, and the engine's passes between them.

    In a pass the engine samples until a response has finished. It runs no pass while a coroutine is busy. Therefore all requests
    that coroutines make between two passes start in one pass, in the order of the coroutines. The runtime of the coroutines does
    not matter. The bits of responses depend on this order, because kernels round differently for other batches.

    Args:
        engine: the engine of this rank, without other users during the run. An engine of several ranks is a
            :class:`rlhf_mcore.sampling.followers.LedEngine`.
    """

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._open: dict[int, tuple[Request, asyncio.Future[Completion], _Worker]] = {}
        self._due: list[tuple[int, Request]] = []  # to be submitted in the next pass, with the numbers of their workers
        self._cancelled: list[int] = []  # to be cancelled in the next pass
        self._answered: dict[int, str] = {}  # names of requests
        self._pass_waits: list[tuple[asyncio.Future[None], _Worker]] = []
        self._num_begun = self._num_busy = 0
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a completion."""
        return len(self._open)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and the passes that it waits for. Returns the result of the coroutine.

        Raises:
            LostTrajectory: the engine answers a request twice or never, or answers a request that was not made.
            RuntimeError: a response is not valid for training.
        """
        task = self.begin(coroutine)
        try:
            while not task.done():
                if self._num_busy:
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    self._make_pass()
            return task.result()
        finally:
            await cancel_all([task])
            if self._cancelled:
                self._engine.cancel(self._cancelled)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine that may call ``sample``. ``join`` waits for its task."""
        worker = _Worker(self._num_begun)
        self._num_begun += 1
        self._num_busy += 1

        async def work() -> T:
            _CURRENT.set(worker)
            return await coroutine

        def end_worker(_: asyncio.Task[T]) -> None:
            coroutine.close()  # in case it was cancelled before it started
            self._num_busy -= 1
            self._changed.set()

        task = asyncio.ensure_future(work())
        task.add_done_callback(end_worker)
        return task

    async def join(self, tasks: Sequence[asyncio.Task[T]]) -> list[T]:
        """Wait for tasks of ``begin`` and return their results, in order. The first error is raised, and cancels the other tasks."""
        try:
            if waiting := [task for task in tasks if not task.done()]:
                joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                worker, left = _CURRENT.get(), len(waiting)

                def count_down(task: asyncio.Task[T]) -> None:
                    nonlocal left
                    left -= 1
                    if (not left or task.cancelled() or task.exception() is not None) and not joined.done():
                        self._resolve(joined, None, worker)

                for task in waiting:
                    task.add_done_callback(count_down)
                await self._wait(joined, worker)
            failed = [task for task in tasks if task.done() and (task.cancelled() or task.exception() is not None)]
            return [task.result() for task in failed or tasks]
        finally:
            await cancel_all(tasks)

    async def sample(self, request: Request) -> Completion:
        """Return the engine's completion of a request. If the caller is cancelled, the next pass cancels the request."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        worker = _CURRENT.get()
        self._open[request.request_id] = request, future, worker
        self._due.append((worker.number, request))
        try:
            return await self._wait(future, worker)
        except asyncio.CancelledError:
            if self._open.pop(request.request_id, None) is not None:
                still_due = [due for due in self._due if due[1] is not request]
                if len(still_due) == len(self._due):
                    self._cancelled.append(request.request_id)
                self._due = still_due
            raise

    async def next_pass(self) -> None:
        """Wait until the engine has run one pass. At least one response finishes in a pass."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker = _CURRENT.get()
        self._pass_waits.append((future, worker))
        await self._wait(future, worker)

    def _make_pass(self) -> None:
        assert self._open, "coroutines wait for what no pass will bring"
        due, self._due = sorted(self._due, key=lambda due: due[0]), []
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._engine.cancel(cancelled)
        if due:
            self._engine.submit([request for _, request in due])
        for completion in self._engine.collect(math.inf) if self._engine.num_in_flight else ():
            self._take(completion)
        if self._open and not self._engine.num_in_flight:
            missing = [f"none for {request.name}" for request, *_ in self._open.values()]
            raise LostTrajectory(
                f"the engine returned {len(self._answered)} completions for {len(self._answered) + len(missing)} requests: "
                f"{shortened(missing)}. {REMEDY}"
            )
        waits, self._pass_waits = self._pass_waits, []
        for future, worker in waits:
            if not future.done():
                self._resolve(future, None, worker)

    def _take(self, completion: Completion) -> None:
        number = completion.request_id
        if number not in self._open:
            if number in self._answered:
                raise LostTrajectory(f"the engine returned 2 completions for {self._answered[number]}. {REMEDY}")
            raise LostTrajectory(f"the engine answered request {number}, which was not made. {REMEDY}")
        request, future, worker = self._open.pop(number)
        check_completion(request, completion)
        self._answered[number] = request.name
        self._resolve(future, completion, worker)

    async def _wait(self, future: asyncio.Future[T], worker: _Worker) -> T:
        """Wait for a future that ``_resolve`` resolves. The worker is not busy during the wait."""
        worker.num_waits += 1
        if worker.num_waits == 1:
            self._num_busy -= 1
            self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():  # the waiting task cancelled it, so ``_resolve`` did not run
                self._wake(worker)
            raise

    def _resolve(self, future: asyncio.Future[T], value: T, worker: _Worker) -> None:
        """Resolve a future. Its worker is busy immediately, before its task continues."""
        future.set_result(value)
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        worker.num_waits -= 1
        if not worker.num_waits:
            self._num_busy += 1
