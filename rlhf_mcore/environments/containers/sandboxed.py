"""Containers of our own: the sandbox of untrusted programs (:mod:`rlhf_mcore.sandbox.run`), whose files stay until it ends.

They need no daemon, no image and no rights: the system's programs and this Python, read-only, a few directories in memory, no network.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import sys
from concurrent.futures import ThreadPoolExecutor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import Container, Order, Ran
from rlhf_mcore.environments.containers.dockerfiles import without_docker
from rlhf_mcore.environments.containers.task import Room, Task
from rlhf_mcore.sandbox.run import REMEDIES, Limits, Program, Reason, Sandbox, machine_level, site_packages

KEY = "environment.container.kind"
PLACES = ("/app", "/workspace", "/testbed", "/tests", "/logs", "/solution", "/root", "/home", "/repo")
FILES_BYTES = 2**28  # of a container, in memory
_THREADS = ThreadPoolExecutor(64, thread_name_prefix="container")  # a command occupies one while it runs
_LEVEL = "namespaces"
_REASONS = {
    Reason.TIMEOUT: "timeout",
    Reason.MEMORY: "memory",
    Reason.OUTPUT_LIMIT: "output",
    Reason.KILLED: "killed",
}


def check_machine() -> None:
    """Refuse a machine whose sandbox has no file system of its own.

    Raises:
        ConfigError: it gives no namespaces.
    """
    if not (level := machine_level()).reaches(_LEVEL):
        why = "; ".join(level.missing) or f"its isolation is {level.name}"
        raise ConfigError(f"{KEY}=sandbox: this machine gives no namespaces ({why}): {REMEDIES[_LEVEL]}")


class SandboxContainer(Container):
    """A sandbox that keeps its files. Everything that a command has started ends with the command."""

    unpack = "tar -xPof - -C /scratch"  # the root itself cannot be opened

    def __init__(self, sandbox: Sandbox, timeout_s: float, task: Task, memory_bytes: int) -> None:
        path = f"{os.path.join(sys.base_prefix, 'bin')}:/usr/local/bin:/usr/bin:/bin"
        env = {"PATH": path, "PYTHONPATH": ":".join(site_packages()), "HOME": "/tmp", **task.env}
        super().__init__(timeout_s, task.workdir or PLACES[0], env)
        self._sandbox, self._memory_bytes, self._turn = sandbox, memory_bytes, asyncio.Lock()

    async def _execute(self, order: Order) -> Ran | None:
        limits = Limits(order.timeout_s, order.timeout_s, self._memory_bytes, FILES_BYTES, order.max_bytes, 128, 1024)
        argv = ("/usr/bin/env", "-C", order.cwd, *(f"{name}={value}" for name, value in order.env.items()))
        program = Program(kind="command", argv=(*argv, "/bin/sh", "-c", order.command))
        async with self._turn:
            result = await asyncio.get_running_loop().run_in_executor(
                _THREADS, lambda: self._sandbox.run(program, limits, stdin=order.stdin)
            )
        if self._sandbox.has_ended:
            return None
        if result.reason is Reason.REFUSED:
            raise OSError(f"the command cannot be run: {result.detail}")
        return Ran(result.exit_code, result.stdout, result.stderr, _REASONS.get(result.reason, ""))

    async def _end(self) -> None:
        await asyncio.get_running_loop().run_in_executor(_THREADS, self._sandbox.close)


class SandboxKind:
    """Opens sandboxes.

    Raises:
        ConfigError: this machine gives no namespaces.
    """

    def __init__(self) -> None:
        check_machine()

    async def open(self, task: Task, room: Room) -> Container:
        """Open one; the directory that commands begin in is there."""
        own = [] if not task.workdir or _is_place(task.workdir) else [posixpath.normpath(task.workdir)]

        def start() -> Sandbox:
            return Sandbox(_LEVEL, site_packages(), [*PLACES, *own], keeps=True)

        sandbox = await asyncio.get_running_loop().run_in_executor(_THREADS, start)
        return SandboxContainer(sandbox, room.timeout_s, task, room.memory_bytes)

    async def warm(self, task: Task) -> Task:
        """Read the Dockerfile of a task, where it has one."""
        if task.image is not None:
            raise ConfigError(
                f"{KEY}=sandbox has no images, and a task is made for {task.image}; use docker, podman or remote"
            )
        return without_docker(task) if "Dockerfile" in task.context else task


def _is_place(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in ("/tmp", "/scratch", *PLACES))
