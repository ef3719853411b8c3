"""Run rollouts as coroutines on an engine that answers each request separately."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.coroutines import cancel_all
from rlhf_mcore.sampling.engine_loop import EngineLoop, OnTokens, check_completion

if TYPE_CHECKING:
    from rlhf_mcore.protocols import AsyncEngine
    from rlhf_mcore.types import Completion, Request

T = TypeVar("T")
_PROGRESS_S = 1.0  # seconds between two progress reports


class ServedLoop:
    """Runs coroutines that sample from an AsyncEngine, like EngineLoop. There are no passes: each request is sent at once.

    Args:
        engine: the engine, without other users during the run.
        places: maximum number of coroutines in a block of ``place``. None: no limit.
    """

    def __init__(self, engine: AsyncEngine, places: int | None = None) -> None:
        self._engine = engine
        self._places = None if places is None else asyncio.Semaphore(places)
        self._failed: asyncio.Future[Any]  # resolves to the engine's error
        self._answered = asyncio.Event()
        self.num_in_flight = 0  # number of requests without a completion

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine. Returns its result.

        Raises:
            RuntimeError: the engine failed, or a response is not valid for training.
        """
        self._failed = asyncio.get_running_loop().create_future()
        task = self.begin(coroutine)
        try:
            while not (task.done() or self._failed.done()):
                await asyncio.wait([task, self._failed], timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                if self.num_in_flight and self._engine.on_progress is not None:
                    self._engine.on_progress()
            if self._failed.done():
                raise self._failed.result()
            return task.result()
        finally:
            await cancel_all([task])

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine that may call ``sample``. ``join`` waits for its task."""
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda _: self._answered.set())
        return task

    async def join(self, tasks: Sequence[asyncio.Task[T]]) -> list[T]:
        """Wait for tasks of ``begin`` and return their results, in order. The first error is raised, and cancels the other tasks."""
        try:
            return await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)

    async def sample(self, request: Request, on_tokens: OnTokens | None = None, num_cached: int = 0) -> Completion:
        """Return the engine's completion of a request. An error of the engine also ends ``run``.

        ``on_tokens`` receives nothing, because the engine does not report tokens before the end.

        Raises:
            RuntimeError: the engine failed, or the response is not valid for training.
        """
        self.num_in_flight += 1
        try:
            completion = await self._engine.answer(request)
        except Exception as error:
            if not self._failed.done():
                self._failed.set_result(error)
            raise
        finally:
            self.num_in_flight -= 1
            self._answered.set()
        check_completion(request, completion)
        return completion

    async def next_pass(self) -> None:
        """Wait until a request has its completion, or a coroutine has ended."""
        self._answered.clear()
        await self._answered.wait()

    def place(self) -> AbstractAsyncContextManager[None]:
        """Hold one of ``places`` during the block. Coroutines get places in the order of their calls."""
        return nullcontext() if self._places is None else self._places


# A loop that runs rollouts.
RolloutLoop = EngineLoop | ServedLoop
