"""The containers that a run is configured for: opened for a task, prepared, and closed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import Container
from rlhf_mcore.environments.containers.task import USUAL, Room, Task

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import EnvironmentConfig

_SHOWN_CHARS = 600
_WARMED_AT_A_TIME = 4
_MARGIN_S = 60.0  # that a container lives longer than anybody may need it


class Kind(Protocol):
    """Open containers of one kind."""

    async def open(self, task: Task, room: Room) -> Container:
        """Open a container that is empty, but for what its image has.

        Raises:
            ConfigError: there is nothing for the task.
            OSError: it cannot be opened.
        """

    async def warm(self, task: Task) -> Task:
        """Have here what opening needs. Returns the task without what has been done of it.

        Raises:
            ConfigError: there is nothing for the task.
        """


class Containers:
    """Containers of a kind: "sandbox", "docker", "podman" or "remote".

    Args:
        kind: of these.
        room: what each may use.
        url: of a service (remote). ``token_env``: the variable with its token.
        image: of tasks that name none.

    Raises:
        ConfigError: this machine has no such containers.
    """

    def __init__(
        self,
        kind: str,
        room: Room = USUAL,
        url: str | None = None,
        token_env: str | None = None,
        image: str | None = None,
    ) -> None:
        self._room, self._is_remote = room, kind == "remote"
        self._kind = self._make(kind, room, url, token_env, image)

    @staticmethod
    def _make(kind: str, room: Room, url: str | None, token_env: str | None, image: str | None) -> Kind:
        if kind == "sandbox":
            from rlhf_mcore.environments.containers.sandboxed import SandboxKind

            return SandboxKind()
        if kind == "remote":
            from rlhf_mcore.environments.containers.remote import RemoteKind

            if token_env is not None and not os.environ.get(token_env):
                raise ConfigError(
                    f"environment.container.token_env={token_env}: there is no such variable, or it is empty"
                )
            return RemoteKind(url or "", os.environ[token_env] if token_env else None)
        from rlhf_mcore.environments.containers.docker import DockerKind

        return DockerKind(kind, image, room.start_timeout_s)

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[Container]:
        """Open a container (:meth:`open`) and close it behind the block."""
        container = await self.open(task)
        try:
            yield container
        finally:
            await container.close()

    async def open(self, task: Task) -> Container:
        """Open a container, with the files of its task, after its setup (:meth:`open_in`)."""
        return await self.open_in(task, self._room)

    async def open_in(self, task: Task, room: Room) -> Container:
        """Open a container that has ``room``.

        Raises:
            ContainerLost: it has ended meanwhile.
            ConfigError: this kind has nothing for the task, or the setup fails.
            OSError: it cannot be opened.
        """
        task = await self._kind.warm(task)
        container = await self._kind.open(task, room)
        if self._is_remote:  # the service prepares it
            return container
        try:
            await self._prepare(container, task, room)
        except BaseException:
            await container.close()
            raise
        return container

    @staticmethod
    async def _prepare(container: Container, task: Task, room: Room) -> None:
        if task.files:
            await container.write(task.files)
        for command in task.setup:
            ran = await container.run(command, timeout_s=room.start_timeout_s)
            if not ran.ok:
                shown = ran.output.strip()[-_SHOWN_CHARS:] or ran.reason
                raise ConfigError(f"the setup of a task fails in its container, {command!r:.200}: {shown}")

    async def warm(self, tasks: Iterable[Task]) -> None:
        """Have here what the containers of tasks need, such as images, a few at a time.

        Raises:
            ConfigError: it cannot be had, or this kind has nothing for a task.
        """
        slots = asyncio.Semaphore(_WARMED_AT_A_TIME)

        async def warm(task: Task) -> None:
            async with slots:
                await self._kind.warm(task)

        await asyncio.gather(*map(warm, tasks))


def options_of(own: EnvironmentConfig) -> dict[str, Any]:
    """Return what ``containers_of`` takes, as JSON, from the configuration of a run with containers."""
    given = own.container
    lives_s = given.start_timeout_s + own.agent.timeout_s + given.tests_timeout_s + _MARGIN_S
    room = {"timeout_s": given.timeout_s, "start_timeout_s": given.start_timeout_s, "cpus": given.cpus}
    room |= {"memory_bytes": int(given.memory_gib * 2**30), "network": given.network, "lives_s": lives_s}
    named = {name: getattr(given, name) for name in ("kind", "url", "token_env", "image")}
    return {**named, "room": room, "tests_timeout_s": given.tests_timeout_s, "host": own.agent.host}


def containers_of(options: Mapping[str, Any]) -> Containers:
    """Make the containers that ``options_of`` has described.

    Raises:
        ConfigError: this machine has no such containers.
    """
    named = {name: options[name] for name in ("kind", "url", "token_env", "image")}
    return Containers(room=Room(**options["room"]), **named)


def longest_s(own: EnvironmentConfig) -> float:
    """Return the seconds that containers may add to an episode: each try has one, and one more where one was lost."""
    given = own.container
    tries = own.agent.retries + 2
    return tries * (2 * given.start_timeout_s + given.tests_timeout_s + _MARGIN_S) + own.agent.timeout_s
