"""Open the container of each try of an episode, share it with an agent in another process, and run its task's tests."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rlhf_mcore.environments.containers.container import Container
from rlhf_mcore.environments.containers.kinds import containers_of
from rlhf_mcore.environments.containers.task import Task, TaskTests
from rlhf_mcore.plugins import load_plugin

REWARDS = "/logs/verifier"  # folder into which Harbor's tests write reward.txt or reward.json
# Kill the agent's processes, and remove its files from the folders of tests and rewards.
_PREPARE = (
    "for each in /proc/[0-9]*; do each=${each#/proc/}; "
    '[ "$each" = 1 ] || [ "$each" = $$ ] || [ "$each" = $PPID ] || kill -9 "$each" 2>/dev/null; done; '
    f"rm -rf /tests/* /tests/.[!.]* {REWARDS}; mkdir -p {REWARDS}; true"
)


@dataclass(frozen=True, slots=True)
class Workplace:
    """The container of a try. ``lent`` contains its address and key for an agent in another process."""

    container: Container
    lent: Mapping[str, str] = field(default_factory=dict)


class Workplaces:
    """Open containers, and share them over HTTP with agents in other processes.

    Args:
        options: options from ``kinds.options_of``.
        lends_for: names the keys that require sharing, for error messages; "": the agent is a function in this process.

    Raises:
        ConfigError: this machine does not support such containers, or the plug-in that shares them is not installed.
    """

    def __init__(self, options: Mapping[str, Any], lends_for: str = "") -> None:
        self._containers = containers_of(options)
        self._tests_timeout_s = options["tests_timeout_s"]
        self._lender: Any = None
        if lends_for:
            lender = load_plugin("container_extras", "lending", lends_for, package="containers")
            self._lender = lender(options["host"])

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Workplace]:
        """Open a container for a task, and close it at the end of the block."""
        async with self._containers.opened(task) as container:
            if self._lender is None:
                yield Workplace(container)
                return
            async with self._lender.lend(container) as lent:
                yield Workplace(container, lent)

    async def grade(self, container: Container, task: Task) -> float | None:
        """Run the tests of a task, and return the score; None if the task has no tests."""
        return None if task.tests is None else await grade(container, task.tests, self._tests_timeout_s)


@lru_cache(maxsize=1)
def workplaces_of(options: str, lends_for: str) -> Workplaces:
    """Build the workplaces of this process, once. ``options`` is a JSON text."""
    return Workplaces(json.loads(options), lends_for)


async def grade(container: Container, tests: TaskTests, most_s: float) -> float:
    """Run tests for at most ``most_s`` seconds. Returns the score (:class:`rlhf_mcore.environments.containers.task.TaskTests`).

    Raises:
        ContainerLost: the container has ended.
        OSError: the files of the tests cannot be written.
    """
    await container.run(_PREPARE, cwd="/")
    if tests.files:
        await container.write(tests.files)
    ran = await container.run(tests.command, timeout_s=min(tests.timeout_s, most_s), env=tests.env)
    written = await _written(container)
    if written is not None:
        return written
    return 0.0 if tests.needs_file else float(ran.ok)


async def _written(container: Container) -> float | None:
    for name in ("reward.txt", "reward.json"):
        shown = await container.run(f"cat {REWARDS}/{name}", cwd="/")
        if not shown.ok:
            continue
        try:
            value = json.loads(shown.stdout)
            if isinstance(value, dict):
                value = value["reward"] if "reward" in value else sum(value.values()) / len(value)
            number = float(value)
        except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
            return 0.0
        return number if math.isfinite(number) else 0.0
    return None
