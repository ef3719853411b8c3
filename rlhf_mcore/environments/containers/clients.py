"""Call programs with a limit for their output. If the caller stops waiting, the program is killed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from rlhf_mcore.environments.containers.container import CommandResult

_END_S = 5.0  # maximum wait for the end of a killed process


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process if it still runs, and wait for its end.

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


async def call(
    program: str, *arguments: str, stdin: bytes = b"", timeout_s: float, max_bytes: int = 2**16
) -> CommandResult:
    """Call a client program, and return its result. Processes that it started in a container may outlive it."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    async def tell() -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):
            process.stdin.write(stdin)
            await process.stdin.drain()
        process.stdin.close()

    streams = [asyncio.ensure_future(_read(stream, max_bytes)) for stream in (process.stdout, process.stderr)]
    told = asyncio.ensure_future(tell())
    try:
        await asyncio.wait_for(asyncio.gather(*streams, told), timeout_s)
        out, err = (stream.result() for stream in streams)
        code = await asyncio.wait_for(process.wait(), timeout_s)
        return CommandResult(code, out.decode(errors="replace"), err.decode(errors="replace"))
    except asyncio.TimeoutError:
        return CommandResult(None, reason="timeout")
    except _TooMuch:
        return CommandResult(None, reason="output")
    finally:
        for task in (*streams, told):
            task.cancel()
        await asyncio.gather(*streams, told, return_exceptions=True)
        await end(process)


class _TooMuch(Exception):
    pass


async def _read(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    data = b""
    while part := await stream.read(2**16):
        data += part
        if len(data) > max_bytes:
            raise _TooMuch
    return data
