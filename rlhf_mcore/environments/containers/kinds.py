"""Open, prepare and close the containers that a run is configured for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import Container, ContainerKind, KindSettings
from rlhf_mcore.environments.containers.docker import DockerKind
from rlhf_mcore.environments.containers.sandboxed import SandboxKind
from rlhf_mcore.environments.containers.task import USUAL, ContainerLimits, Task
from rlhf_mcore.plugins import load_plugin

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import EnvironmentConfig

_SHOWN_CHARS = 600
_WARMED_AT_A_TIME = 4
START_TIMES = 5  # the limit for an image or a setup command, as a multiple of environment.container.timeout_s
_MARGIN_S = 60.0  # added to the lifetime of a container


def make_kind(name: str, settings: KindSettings) -> ContainerKind:
    """Build a kind of containers: the sandbox, Docker, or a plug-in.

    Raises:
        ConfigError: this machine does not support such containers, or the plug-in is not installed.
    """
    if name == "sandbox":
        return SandboxKind()
    if name == "docker":
        return DockerKind("docker", settings)
    plugin = load_plugin("containers", name, f"environment.container.kind={name}", package="containers")
    kind: ContainerKind = plugin(settings)
    return kind


class Containers:
    """Containers of one kind.

    Args:
        kind: name of the kind, for example "sandbox" or "docker".
        limits: limits of each container.
        url: address of a service. ``token_env``: name of the variable with its token.
        image: image for tasks that name no image.

    Raises:
        ConfigError: this machine does not support such containers.
    """

    def __init__(
        self,
        kind: str,
        limits: ContainerLimits = USUAL,
        url: str | None = None,
        token_env: str | None = None,
        image: str | None = None,
    ) -> None:
        self._limits = limits
        self._kind = make_kind(kind, KindSettings(image, limits.start_timeout_s, url, token_env))

    @asynccontextmanager
    async def opened(self, task: Task) -> AsyncIterator[Container]:
        """Open a container (:meth:`open`), and close it at the end of the block."""
        container = await self.open(task)
        try:
            yield container
        finally:
            await container.close()

    async def open(self, task: Task) -> Container:
        """Open a container, write the files of its task, and run its setup (:meth:`open_in`)."""
        return await self.open_in(task, self._limits)

    async def open_in(self, task: Task, limits: ContainerLimits) -> Container:
        """Open a container with these limits, write the files of its task, and run its setup.

        Raises:
            ContainerLost: the container has ended meanwhile.
            ConfigError: this kind does not support the task, or the setup fails.
            OSError: the container cannot be opened.
        """
        task = await self._kind.warm(task)
        container = await self._kind.open(task, limits)
        if self._kind.prepares:
            return container
        try:
            await self._prepare(container, task, limits)
        except BaseException:
            await container.close()
            raise
        return container

    @staticmethod
    async def _prepare(container: Container, task: Task, limits: ContainerLimits) -> None:
        if task.files:
            await container.write(task.files)
        for command in task.setup:
            ran = await container.run(command, timeout_s=limits.start_timeout_s)
            if not ran.ok:
                shown = ran.output.strip()[-_SHOWN_CHARS:] or ran.reason
                raise ConfigError(f"a setup command of a task failed in its container, {command!r:.200}: {shown}")

    async def warm(self, tasks: Iterable[Task]) -> None:
        """Prepare everything that the containers of tasks need, for example images. A few tasks are prepared concurrently.

        Raises:
            ConfigError: something cannot be prepared, or this kind does not support a task.
        """
        slots = asyncio.Semaphore(_WARMED_AT_A_TIME)

        async def warm(task: Task) -> None:
            async with slots:
                await self._kind.warm(task)

        await asyncio.gather(*map(warm, tasks))


def options_of(own: EnvironmentConfig) -> dict[str, Any]:
    """Return the options for ``containers_of`` as JSON values, from the configuration of a run with containers."""
    given = own.container
    lives_s = START_TIMES * given.timeout_s + own.agent.timeout_s + given.tests_timeout_s + _MARGIN_S
    limits = {"timeout_s": given.timeout_s, "start_timeout_s": START_TIMES * given.timeout_s, "cpus": given.cpus}
    limits |= {"memory_bytes": int(given.memory_gib * 2**30), "network": given.network, "lives_s": lives_s}
    named = {name: getattr(given, name) for name in ("kind", "url", "token_env", "image")}
    return {**named, "limits": limits, "tests_timeout_s": given.tests_timeout_s, "host": own.agent.host}


def containers_of(options: Mapping[str, Any]) -> Containers:
    """Build containers from the options of ``options_of``.

    Raises:
        ConfigError: this machine does not support such containers.
    """
    named = {name: options[name] for name in ("kind", "url", "token_env", "image")}
    return Containers(limits=ContainerLimits(**options["limits"]), **named)


def longest_s(own: EnvironmentConfig) -> float:
    """Return the maximum seconds that containers add to an episode.

    Each try opens a container, and a lost container allows one additional try.
    """
    given = own.container
    tries = own.agent.retries + 2
    return tries * (2 * START_TIMES * given.timeout_s + given.tests_timeout_s + _MARGIN_S) + own.agent.timeout_s
