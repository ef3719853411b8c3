"""The interface of a container for agents: run commands, write files, read files.

A kind of containers consists of a ``Container`` that implements ``_execute`` and ``_end``, and a ``ContainerKind`` that opens it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import posixpath
import secrets
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_mcore.environments.containers.task import ContainerLimits, Task
from rlhf_mcore.foreign import is_plain, shorten

MAX_OUTPUT_BYTES = 2**20  # limit for standard output, and for standard error, of a command
MAX_FILE_BYTES = 2**24  # limit for a file that is read
MAX_COMMAND_BYTES = MAX_FILE_BYTES
_ARGUMENT_BYTES = 2**16  # a longer command is written to a file: Linux allows arguments of 128 KiB
_VALUE_BYTES, _VALUES_BYTES = (
    2**17 - 1,
    2**19,
)  # Linux's limits for a variable with its name, and for all variables with ``cwd``
# Only regular files are read, because a pipe or a device may have no end.
_GET = '''[ -f "$CONTAINER_FILE" ] || { echo "there is no regular file" >&2; exit 1; }; base64 < "$CONTAINER_FILE"'''
_EVAL = 'CONTAINER_COMMAND=$(cat {0}) && rm -f {0} && eval "$CONTAINER_COMMAND"'


class ContainerLost(RuntimeError):
    """A container ended before its episode, and its files are lost."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. ``reason``: "" or why it was stopped ("timeout", "memory", "output" or "killed")."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.reason

    @property
    def output(self) -> str:
        """Return standard output and then standard error."""
        return self.stdout + self.stderr


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command for the shell of a container."""

    command: str
    stdin: bytes
    timeout_s: float
    cwd: str
    env: Mapping[str, str]
    max_bytes: int = MAX_OUTPUT_BYTES


class Container(ABC):
    """An open container. ``timeout_s`` is the default limit of a command; all commands start with ``cwd`` and ``env``."""

    unpack = "tar -xof - -C /"  # unpacks files with absolute names
    scratch: str | None = "/tmp"  # directory for long commands, which run from a file; None: pass them unchanged

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
    ) -> CommandResult:
        """Run a command in a shell, for at most ``timeout_s``. If the coroutine is cancelled, the command is killed.

        A command that no shell can run, for example a command with a NUL, ends with exit code 126.

        Raises:
            ContainerLost: the container has ended.
        """
        given = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        order = ShellCommand(command, given, timeout_s or self.timeout_s, cwd or self.cwd, {**self.env, **(env or {})})
        size = len(command.encode("utf-8", "replace"))
        if self.scratch is not None and _ARGUMENT_BYTES < size <= MAX_COMMAND_BYTES:
            name = f"{self.scratch}/.command-{secrets.token_hex(8)}"
            try:
                await self.write({name: command})
            except OSError as error:
                return CommandResult(126, stderr=f"{error}\n")
            order = replace(order, command=_EVAL.format(name))
        return await self._run(order)

    async def _run(self, order: ShellCommand) -> CommandResult:
        if self.is_lost:
            raise ContainerLost("the container has ended")
        if problem := _problem(order):
            return CommandResult(126, stderr=f"{problem}\n")
        ran = await self._execute(order)
        if ran is None:
            self.is_lost = True
            raise ContainerLost("the container has ended")
        return ran

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files by their paths, and create their directories. Relative paths start at ``cwd``.

        Raises:
            OSError: a file cannot be written.
            ContainerLost: the container has ended.
        """
        packed = {posixpath.join(self.cwd, path): content for path, content in files.items()}
        ran = await self._run(ShellCommand(self.unpack, _tar_of(packed), self.timeout_s, "/", self.env))
        if not ran.ok:
            names = shorten(", ".join(packed), 200)
            raise OSError(f"{names} cannot be written: {shorten(ran.output.strip(), 1000) or ran.reason}")

    async def read(self, path: str) -> bytes:
        """Read a file of at most ``MAX_FILE_BYTES``.

        Raises:
            OSError: the file does not exist, or is larger.
            ContainerLost: the container has ended.
        """
        name = posixpath.join(self.cwd, path)
        env = {**self.env, "CONTAINER_FILE": name}
        ran = await self._run(ShellCommand(_GET, b"", self.timeout_s, "/", env, MAX_FILE_BYTES * 3 // 2))
        if not ran.ok:
            raise OSError(f"{shorten(name, 200)} cannot be read: {ran.stderr.strip() or ran.reason}")
        return base64.b64decode(ran.stdout)

    async def close(self) -> None:
        """Stop the container and its processes. Later calls raise ``ContainerLost``."""
        self.is_lost = True
        await self._end()

    @abstractmethod
    async def _execute(self, order: ShellCommand) -> CommandResult | None:
        """Run a command. Returns its result; None if the container has ended."""

    @abstractmethod
    async def _end(self) -> None: ...


def _problem(order: ShellCommand) -> str:
    """Return the reason why no shell can run a command; "" if a shell can."""
    texts = {"the command": order.command, "cwd": order.cwd}
    texts |= {f"env {shorten(name, 40)}": f"{name}={value}" for name, value in order.env.items()}
    sizes = {}
    for name, text in texts.items():
        if not is_plain(text):
            return f"{name} has a NUL or a lone surrogate"
        sizes[name] = len(text.encode())
    if sizes.pop("the command") > MAX_COMMAND_BYTES:
        return f"the command has more than {MAX_COMMAND_BYTES:,} bytes; write it to a file"
    if too_long := next((name for name, size in sizes.items() if size > _VALUE_BYTES), None):
        return f"{too_long} has more than {_VALUE_BYTES:,} bytes"
    if sum(sizes.values()) > _VALUES_BYTES:
        return f"cwd and env have more than {_VALUES_BYTES:,} bytes"
    return ""


def _tar_of(files: Mapping[str, str | bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            data = content.encode("utf-8", "replace") if isinstance(content, str) else content
            member = tarfile.TarInfo(posixpath.normpath(path))
            member.size, member.mode = len(data), 0o755 if data.startswith(b"#!") or path.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


@dataclass(frozen=True, slots=True)
class KindSettings:
    """The keys of ``environment.container`` from which a kind of containers is built."""

    image: str | None = None  # image for tasks that name no image
    start_timeout_s: float = 300.0
    url: str | None = None  # address of a service
    token_env: str | None = None  # name of the variable with its token


class ContainerKind(ABC):
    """A kind of containers. A plug-in in the group ``rlhf_mcore.containers`` builds one from ``KindSettings``."""

    prepares = False  # whether ``open`` also writes the files of the task and runs its setup

    @abstractmethod
    async def open(self, task: Task, limits: ContainerLimits) -> Container:
        """Open a container that contains only its image.

        Raises:
            ConfigError: this kind does not support the task.
            OSError: the container cannot be opened.
        """

    @abstractmethod
    async def warm(self, task: Task) -> Task:
        """Prepare everything that ``open`` needs, for example an image. Returns the task without the prepared parts.

        Raises:
            ConfigError: this kind does not support the task.
        """


class Blocking:
    """A container for an agent that is an ordinary function and runs in a thread. The methods block."""

    def __init__(self, container: Container, loop: asyncio.AbstractEventLoop) -> None:
        self._container, self._loop = container, loop

    def _wait(self, begun: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(begun, self._loop).result()

    def run(self, command: str, **how: Any) -> CommandResult:
        """Run a command (:meth:`Container.run`)."""
        ran: CommandResult = self._wait(self._container.run(command, **how))
        return ran

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files (:meth:`Container.write`)."""
        self._wait(self._container.write(files))

    def read(self, path: str) -> bytes:
        """Read a file (:meth:`Container.read`)."""
        content: bytes = self._wait(self._container.read(path))
        return content
