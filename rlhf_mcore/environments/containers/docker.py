"""Docker containers, controlled with the command line. Podman has the same command line.

No directory of the host is mounted, and no variable of the host is passed on. There is no network unless the run allows it.
A container stops itself at the end of its lifetime.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import OutputTooLong, end_program, exchange, start_program
from rlhf_mcore.environments.containers.container import (
    CommandResult,
    Container,
    ContainerKind,
    KindSettings,
    ShellCommand,
)
from rlhf_mcore.environments.containers.task import ContainerLimits, Task

KEY = "environment.container.kind"
DEFAULT_IMAGE = "python:3.11-slim"
# Docker's default capabilities that installing packages and running tests need.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_PIDS = 512
# The first process reaps other processes. It stops at the end of the container's lifetime, even if all others were killed.
_LIVES = 'end=$(($(date +%s)+{})); while [ "$(date +%s)" -lt "$end" ]; do sleep 1; done'
_SLACK_S = 15.0  # time for the client to return after the deadline of a command
_SHOWN_CHARS = 400
_MARK = "CONTAINER_RUN"  # environment variable that identifies a command and all processes that it starts
_KILL = "for each in /proc/[0-9]*; do if grep -q {0} $each/environ 2>/dev/null; then kill -9 ${{each#/proc/}}; fi; done; true"
_MAY_BE_LOST = (1, 125, 126, 127, 137, 255)  # possible exit codes of a client whose container has ended


class DockerKind(ContainerKind):
    """Containers of ``program``. Each image is pulled or built once; an image is built if a task has a Dockerfile.

    Args:
        program: docker, or another program with the same command line.
        settings: image for tasks that name no image, and limit for pulling or building an image.

    Raises:
        ConfigError: the program is not installed.
    """

    def __init__(self, program: str, settings: KindSettings) -> None:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{KEY}={program}: there is no program {program!r}; install it, or set {KEY} to sandbox or remote"
            )
        self._program, self._timeout_s = program, settings.start_timeout_s
        self._default = settings.image or DEFAULT_IMAGE
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def open(self, task: Task, limits: ContainerLimits) -> Container:
        """Open a container of a local image."""
        return await DockerContainer.open(self._program, task.image or self._default, task, limits)

    async def warm(self, task: Task) -> Task:
        """Pull or build the image of a task.

        Raises:
            ConfigError: the image cannot be pulled or built.
        """
        name, context = task.image or self._default, task.context
        if task.image is None and "Dockerfile" in context:
            digest = hashlib.sha256()
            for path, content in sorted(context.items()):
                digest.update(f"{path}\0{len(content)}\0".encode() + content)
            name = f"rlhf-mcore-task:{digest.hexdigest()[:32]}"
        else:
            context = {}
        if (begun := self._under_way.get(name)) is None or (begun.done() and begun.exception() is not None):
            begun = self._under_way[name] = asyncio.ensure_future(self._get(name, context))
        await asyncio.shield(begun)
        return replace(task, image=name, context={})

    async def _get(self, name: str, context: dict[str, bytes]) -> None:
        if (await _call(self._program, "image", "inspect", name, timeout_s=60, max_bytes=2**24)).ok:
            return
        if not context:
            ran = await _call(self._program, "pull", name, timeout_s=self._timeout_s, max_bytes=2**24)
        else:
            with tempfile.TemporaryDirectory() as folder:
                for path, content in context.items():
                    if not Path(folder, path).resolve().is_relative_to(Path(folder).resolve()):
                        raise ConfigError(
                            f"{KEY}={self._program}: {path!r:.200} is not in the directory of its Dockerfile"
                        )
                    (file := Path(folder, path)).parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
                    file.chmod(0o755 if content.startswith(b"#!") else 0o644)
                build = ("build", "--tag", name, folder)
                ran = await _call(self._program, *build, timeout_s=self._timeout_s, max_bytes=2**26)
        if not ran.ok:
            what = "built from its Dockerfile" if context else "pulled"
            why = ran.output.strip()[-_SHOWN_CHARS:] or f"it took longer than {self._timeout_s:g} s"
            raise ConfigError(f"{KEY}={self._program}: the image {name} cannot be {what}: {why}")


class DockerContainer(Container):
    """A container that ``program`` runs."""

    def __init__(self, program: str, name: str, timeout_s: float, task: Task) -> None:
        super().__init__(timeout_s, task.workdir or "", task.env)
        self._program, self._name = program, name
        self._can_time = True

    @classmethod
    async def open(cls, program: str, image: str, task: Task, limits: ContainerLimits) -> DockerContainer:
        """Open a container of a local image.

        Raises:
            ContainerLost: the container ended at once.
            OSError: the container cannot be started. The message contains the output of ``program``.
        """
        made = cls(program, f"rlhf-mcore-{secrets.token_hex(8)}", limits.timeout_s, task)
        started = await _call(program, *made._start(image, limits), timeout_s=limits.start_timeout_s)
        if not started.ok:
            await made.close()
            why = started.output.strip()[-_SHOWN_CHARS:] or started.reason
            raise OSError(f"{program} cannot start a container of {image}: {why}")
        try:
            made._can_time = (await made.run("command -v timeout")).ok
            if not made.cwd:
                made.cwd = (await made.run("pwd")).stdout.strip() or "/"
        except BaseException:
            await made.close()
            raise
        return made

    def _start(self, image: str, limits: ContainerLimits) -> Sequence[str]:
        first = ["run", "--detach", "--rm", "--name", self._name, "--label", "rlhf_mcore=episode"]
        first += ["--workdir", self.cwd] if self.cwd else []
        first += ["--stop-signal", "SIGKILL", "--security-opt", "no-new-privileges", "--cap-drop", "ALL"]
        first += [option for name in _CAPABILITIES for option in ("--cap-add", name)]
        first += ["--pids-limit", str(_PIDS), "--memory", str(limits.memory_bytes), "--cpus", f"{limits.cpus:g}"]
        first += [] if limits.network else ["--network", "none"]
        return [*first, "--entrypoint", "/bin/sh", image, "-c", _LIVES.format(int(limits.lives_s))]

    async def _execute(self, order: ShellCommand) -> CommandResult | None:
        options = ["exec", "--interactive", *(("--workdir", order.cwd) if order.cwd else ())]
        mark = f"{_MARK}={secrets.token_hex(8)}"
        options += [option for name, value in order.env.items() for option in ("--env", f"{name}={value}")]
        options += ["--env", mark]
        timed = ["timeout", "-s", "KILL", f"{max(order.timeout_s, 1):.0f}"] if self._can_time else []
        begun = time.monotonic()
        try:
            ran = await _call(
                self._program,
                *options,
                self._name,
                *timed,
                "/bin/sh",
                "-c",
                order.command,
                stdin=order.stdin,
                timeout_s=order.timeout_s + _SLACK_S,
                max_bytes=order.max_bytes,
            )
        except asyncio.CancelledError:
            kill = ("exec", self._name, "/bin/sh", "-c", _KILL.format(mark))
            await asyncio.shield(_call(self._program, *kill, timeout_s=_SLACK_S))
            raise
        if ran.exit_code in _MAY_BE_LOST and not await self._is_alive():
            return None
        if ran.reason == "timeout":  # the command's processes cannot be stopped alone, so stop the container
            await self._end()
            return None
        if ran.exit_code in (137, 143) and time.monotonic() - begun >= order.timeout_s:
            return CommandResult(None, ran.stdout, ran.stderr, "timeout")
        return ran

    async def _is_alive(self) -> bool:
        shown = await _call(self._program, "inspect", "--format", "{{.State.Running}}", self._name, timeout_s=60)
        return shown.stdout.strip() == "true"

    async def _end(self) -> None:
        await _call(self._program, "rm", "--force", self._name, timeout_s=60)


async def _call(
    program: str, *arguments: str, stdin: bytes = b"", timeout_s: float, max_bytes: int = 2**16
) -> CommandResult:
    """Call a client program, and return its result. Processes that it started in a container may outlive it."""
    process = await start_program(program, *arguments)
    try:
        code, out, err = await asyncio.wait_for(exchange(process, stdin, max_bytes), timeout_s)
        return CommandResult(code, out, err)
    except asyncio.TimeoutError:
        return CommandResult(None, reason="timeout")
    except OutputTooLong:
        return CommandResult(None, reason="output")
    finally:
        await end_program(process)
