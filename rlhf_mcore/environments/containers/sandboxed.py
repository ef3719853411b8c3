"""Containers based on the sandbox for untrusted programs (:mod:`rlhf_mcore.sandbox.run`), whose files stay until it ends.

They need no daemon, no image and no privileges. They contain the system's programs and this Python, read-only, and a few
directories in memory. There is no network.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import CommandResult, Container, ContainerKind, ShellCommand
from rlhf_mcore.environments.containers.task import ContainerLimits, Task
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.sandbox.run import REMEDIES, Limits, Program, Reason, Sandbox, machine_level, site_packages

KEY = "environment.container.kind"
PLACES = ("/app", "/workspace", "/testbed", "/tests", "/logs", "/solution", "/root", "/home", "/repo")
FILES_BYTES = 2**28  # limit for the files of a container, in memory
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="container")  # a command occupies one while it runs
_LEVEL = "namespaces"
_REASONS = {
    Reason.TIMEOUT: "timeout",
    Reason.MEMORY: "memory",
    Reason.OUTPUT_LIMIT: "output",
    Reason.KILLED: "killed",
}


def check_machine() -> None:
    """Reject a machine whose sandbox has no separate file system.

    Raises:
        ConfigError: the machine does not support namespaces.
    """
    if not (level := machine_level()).reaches(_LEVEL):
        why = "; ".join(level.missing) or f"its isolation is {level.name}"
        raise ConfigError(f"{KEY}=sandbox: this machine does not support namespaces ({why}): {REMEDIES[_LEVEL]}")


class SandboxContainer(Container):
    """A sandbox that keeps its files. The processes of a command end with the command."""

    unpack = "tar -xPof - -C /scratch"  # the sandbox cannot open / itself
    scratch = "/scratch"  # /tmp is read-only if the interpreter is below it

    def __init__(self, sandbox: Sandbox, timeout_s: float, task: Task, memory_bytes: int) -> None:
        path = f"{os.path.join(sys.base_prefix, 'bin')}:/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "PYTHONPATH": ":".join(site_packages()), "HOME": "/tmp", **task.env}
        super().__init__(timeout_s, task.workdir or PLACES[0], env)
        self._sandbox, self._memory_bytes, self._turn = sandbox, memory_bytes, asyncio.Lock()

    async def _execute(self, order: ShellCommand) -> CommandResult | None:
        limits = Limits(order.timeout_s, order.timeout_s, self._memory_bytes, FILES_BYTES, order.max_bytes, 128, 1024)
        argv = ("/usr/bin/env", "-C", order.cwd, *(f"{name}={value}" for name, value in order.env.items()))
        program = Program(kind="command", argv=(*argv, "/bin/sh", "-c", order.command))
        cancelled = Event()
        async with self._turn:
            running = asyncio.get_running_loop().run_in_executor(
                _THREADS, lambda: self._sandbox.run(program, limits, stdin=order.stdin, cancelled=cancelled)
            )
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                cancelled.set()
                await asyncio.wait([running])  # the next command begins when this one has ended
                raise
        if self._sandbox.has_ended:
            return None
        if result.reason is Reason.REFUSED:
            raise OSError(f"the command cannot be run: {result.detail}")
        return CommandResult(result.exit_code, result.stdout, result.stderr, _REASONS.get(result.reason, ""))

    async def _end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(_THREADS, self._sandbox.close)


class SandboxKind(ContainerKind):
    """The kind "sandbox".

    Raises:
        ConfigError: the machine does not support namespaces.
    """

    def __init__(self) -> None:
        check_machine()

    async def open(self, task: Task, limits: ContainerLimits) -> Container:
        """Open a sandbox with the working directory of the task."""
        own = [] if not task.workdir or _is_place(task.workdir) else [posixpath.normpath(task.workdir)]

        def start() -> Sandbox:
            return Sandbox(_LEVEL, site_packages(), [*PLACES, *own], keeps=True)

        sandbox = await asyncio.get_running_loop().run_in_executor(_THREADS, start)
        return SandboxContainer(sandbox, limits.timeout_s, task, limits.memory_bytes)

    async def warm(self, task: Task) -> Task:
        """Convert the Dockerfile of a task, if it has one, to files and setup commands.

        Raises:
            ConfigError: the task names an image, or its Dockerfile is not supported.
        """
        if task.image is not None:
            raise ConfigError(
                f"{KEY}=sandbox has no images, but a task needs the image {task.image}; use docker, podman or remote"
            )
        if "Dockerfile" not in task.context:
            return task
        without_docker = load_plugin(
            "container_extras", "dockerfile", "a Dockerfile in a sandbox", package="containers"
        )
        prepared: Task = without_docker(task)
        return prepared


def _is_place(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in ("/tmp", "/scratch", *PLACES))
