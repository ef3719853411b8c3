"""Define what an agent has of a container, whatever it is made of: commands, files in, files out.

A kind of container gives two methods, ``_execute`` and ``_end``; the rest follows from them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import posixpath
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

MAX_OUTPUT_BYTES = 2**20  # of a command's standard output, and of its standard error
MAX_FILE_BYTES = 2**24  # that is read at a time
_GET = 'base64 < "$CONTAINER_FILE"'


class ContainerLost(RuntimeError):
    """A container has ended before its episode; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Hold the end of a command. ``reason``: empty, or why it was stopped: "timeout", "memory", "output", "killed"."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.reason

    @property
    def output(self) -> str:
        """Return its output, errors behind the rest."""
        return self.stdout + self.stderr


@dataclass(frozen=True, slots=True)
class Order:
    """A command for the shell of a container."""

    command: str
    stdin: bytes
    timeout_s: float
    cwd: str
    env: Mapping[str, str]
    max_bytes: int = MAX_OUTPUT_BYTES


class Container(ABC):
    """A container that is open. ``timeout_s``: of a command that has none of its own; ``cwd``, ``env``: of all commands."""

    unpack = "tar -xof - -C /"  # of files with absolute names

    def __init__(self, timeout_s: float, cwd: str, env: Mapping[str, str]) -> None:
        self.timeout_s, self.cwd, self.env = timeout_s, cwd, dict(env)
        self.is_lost = False

    async def run(
        self,
        command: str,
        *,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a command in a shell, to its end or to ``timeout_s``.

        Raises:
            ContainerLost: the container has ended.
        """
        given = stdin.encode() if isinstance(stdin, str) else stdin
        return await self._run(
            Order(command, given, timeout_s or self.timeout_s, cwd or self.cwd, {**self.env, **(env or {})})
        )

    async def _run(self, order: Order) -> Ran:
        if self.is_lost:
            raise ContainerLost("the container has ended")
        ran = await self._execute(order)
        if ran is None:
            self.is_lost = True
            raise ContainerLost("the container has ended")
        return ran

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, by their paths; directories are made. A path that is not absolute begins at ``cwd``.

        Raises:
            OSError: they cannot be written there.
            ContainerLost: the container has ended.
        """
        packed = {posixpath.join(self.cwd, path): content for path, content in files.items()}
        ran = await self._run(Order(self.unpack, _tar_of(packed), self.timeout_s, "/", self.env))
        if not ran.ok:
            raise OSError(f"{', '.join(packed)} cannot be written: {ran.output.strip() or ran.reason}")

    async def read(self, path: str) -> bytes:
        """Read a file of at most ``MAX_FILE_BYTES``.

        Raises:
            OSError: there is none, or it is larger.
            ContainerLost: the container has ended.
        """
        name = posixpath.join(self.cwd, path)
        env = {**self.env, "CONTAINER_FILE": name}
        ran = await self._run(Order(_GET, b"", self.timeout_s, "/", env, MAX_FILE_BYTES * 3 // 2))
        if not ran.ok:
            raise OSError(f"{name} cannot be read: {ran.stderr.strip() or ran.reason}")
        return base64.b64decode(ran.stdout)

    async def close(self) -> None:
        """End the container with all that is in it; what comes later finds it lost."""
        self.is_lost = True
        await self._end()

    @abstractmethod
    async def _execute(self, order: Order) -> Ran | None:
        """Run a command; None: the container has ended."""

    @abstractmethod
    async def _end(self) -> None: ...


def _tar_of(files: Mapping[str, str | bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(posixpath.normpath(path))
            member.size, member.mode = len(data), 0o755 if data.startswith(b"#!") or path.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


class Blocking:
    """A container for a function that is no coroutine and runs in a thread: the same methods, which wait."""

    def __init__(self, container: Container, loop: asyncio.AbstractEventLoop) -> None:
        self._container, self._loop = container, loop

    def _wait(self, begun: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(begun, self._loop).result()

    def run(self, command: str, **how: Any) -> Ran:
        """Run a command (:meth:`Container.run`)."""
        ran: Ran = self._wait(self._container.run(command, **how))
        return ran

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files (:meth:`Container.write`)."""
        self._wait(self._container.write(files))

    def read(self, path: str) -> bytes:
        """Read a file (:meth:`Container.read`)."""
        content: bytes = self._wait(self._container.read(path))
        return content
