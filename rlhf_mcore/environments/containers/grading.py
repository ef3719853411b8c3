"""Grade what an agent has left in a container: by the tests of its task."""

from __future__ import annotations

import json
import math

from rlhf_mcore.environments.containers.container import Container
from rlhf_mcore.environments.containers.task import TaskTests

REWARDS = "/logs/verifier"  # where tests of Harbor write reward.txt or reward.json
# What the agent has left running is ended, and what it has written where tests and their results go is removed.
_PREPARE = (
    "for each in /proc/[0-9]*; do each=${each#/proc/}; "
    '[ "$each" = 1 ] || [ "$each" = $$ ] || [ "$each" = $PPID ] || kill -9 "$each" 2>/dev/null; done; '
    f"rm -rf /tests/* /tests/.[!.]* {REWARDS}; mkdir -p {REWARDS}; true"
)


async def grade(container: Container, tests: TaskTests, most_s: float) -> float:
    """Run the tests for ``most_s`` seconds at most. Returns the score: what they write, or else 1 if they end with 0.

    Raises:
        ContainerLost: the container has ended.
        OSError: the tests cannot be brought in.
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
