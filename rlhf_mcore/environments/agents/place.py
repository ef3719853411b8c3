"""The containers of a worker process's agents: one for each try of an episode, lent by HTTP to agents in other processes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiohttp import web

from rlhf_mcore.environments.containers.container import Container
from rlhf_mcore.environments.containers.grading import grade
from rlhf_mcore.environments.containers.kinds import containers_of
from rlhf_mcore.environments.containers.service import Service
from rlhf_mcore.environments.containers.task import Task


@dataclass(frozen=True, slots=True)
class Workplace:
    """The container of a try. ``lent``: where a program in another process finds it, and its key there."""

    container: Container
    lent: Mapping[str, str]


class Place:
    """Opens and lends containers. ``options``: of ``containers.kinds.options_of``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._containers = containers_of(options)
        self._tests_timeout_s, self._host = options["tests_timeout_s"], options["host"]
        self._service = Service()
        self._url = ""

    @asynccontextmanager
    async def opened(self, task: Task, *, lends: bool) -> AsyncIterator[Workplace]:
        """Open a container for a task, and close it behind the block. ``lends``: by HTTP too."""
        if lends and not self._url:
            await self._serve()
        async with self._containers.opened(task) as container:
            name, key = self._service.add(container) if lends else ("", "")
            try:
                yield Workplace(container, {"url": f"{self._url}/containers/{name}", "key": key} if lends else {})
            finally:
                self._service.remove(name)

    async def grade(self, container: Container, task: Task) -> float | None:
        """Run the tests of a task; None: it has none, and its agent gives no reward either."""
        return None if task.tests is None else await grade(container, task.tests, self._tests_timeout_s)

    async def _serve(self) -> None:
        runner = web.AppRunner(self._service.application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        self._url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{runner.addresses[0][1]}"


@lru_cache(maxsize=1)
def place_of(options: str) -> Place:
    """Make the place of this process, once; ``options`` are JSON."""
    return Place(json.loads(options))
