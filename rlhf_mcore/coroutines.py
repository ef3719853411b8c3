"""Run coroutines on the calling thread, or on a separate thread, and end the tasks and programs that they start."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 5.0  # maximum wait for the end of a killed program


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def end_program(process: asyncio.subprocess.Process) -> None:
    """Kill a program of asyncio if it still runs, and wait for its end.

    The output is read and dropped, because asyncio does not notice the end of a process with a full pipe.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    with suppress(asyncio.TimeoutError):  # another process keeps the pipe open
        await asyncio.wait_for(asyncio.gather(process.wait(), *map(_drop, streams)), _END_S)


async def _drop(stream: asyncio.StreamReader) -> None:
    while await stream.read(2**16):
        pass


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result. Its remaining tasks are cancelled.

    It also works inside a running event loop, for example in a notebook. The outer loop is blocked during the call.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
        loop.close()
        asyncio._set_running_loop(outer)


class Background:
    """A thread that runs coroutines while other threads compute. It starts with the first coroutine.

    Coroutines register what must be closed with the thread in ``resources``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock, self.resources = name, Lock(), AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine, from any thread. Returns a future of its result."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel the running coroutines, close the resources and end the thread. A later ``start`` starts a new thread."""
        if current_thread() is self._thread:  # the garbage collector may call this in any thread
            Thread(target=self.close).start()
            return
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return

        async def end() -> None:
            await cancel_all([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
            await self.resources.aclose()

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
