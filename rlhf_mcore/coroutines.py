"""Run coroutines on the calling thread, or on a separate thread, and end the tasks and programs that they start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Coroutine, Mapping
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


class OutputTooLong(Exception):
    """A program printed more than its limit to stdout or stderr."""


async def start_program(*command: str, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """Start a program with pipes, in its own process group."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
    )


async def exchange(process: asyncio.subprocess.Process, stdin: bytes, max_bytes: int) -> tuple[int, str, str]:
    """Send a program its input, and return its exit code, stdout and stderr when it has ended.

    Raises:
        OutputTooLong: it printed more than ``max_bytes`` to stdout or stderr. It may still run.
    """
    assert process.stdout is not None and process.stderr is not None
    streams = (process.stdout, process.stderr)
    sending = asyncio.ensure_future(_send(process, stdin))
    reading = [asyncio.ensure_future(_read(stream, max_bytes)) for stream in streams]
    try:
        await asyncio.gather(sending, *reading)
        code = await process.wait()
        out, err = (each.result().decode(errors="replace") for each in reading)
        return code, out, err
    finally:
        await cancel_all([sending, *reading])


async def _send(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # a program may end without reading its input
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _read(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    data = b""
    while part := await stream.read(2**16):
        data += part
        if len(data) > max_bytes:
            raise OutputTooLong
    return data


async def end_program(process: asyncio.subprocess.Process) -> None:
    """Kill a program of ``start_program`` and its process group if the program still runs, and wait for its end.

    The output is read and dropped, because asyncio does not notice the end of a process with a full pipe.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
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
