"""The pools that graders and functions work in: by default of worker processes beside a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_mcore.rewards.items import WorkerLimits
    from rlhf_mcore.rewards.pool import WorkerPool

MAX_WORKERS = 8  # by default; a function that waits for a server wants more

Verdict = tuple[float, "str | None"]  # a grade, and why there is none: timeout | error


# Name for messages, what is loaded with which options, limits -> a pool: ``local_pool``, or what makes Ray's.
Pools = Callable[[str, str, Mapping[str, Any], "WorkerLimits"], "WorkerPool"]


def local_pool(name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
    """Make a pool of worker processes beside this one. Its module is imported when something asks for it."""
    from rlhf_mcore.rewards.pool import WorkerPool

    return WorkerPool(name, kind, options, limits)


def default_workers(engines: int = 1) -> int:
    """Return this rank's, or one engine's, share of the cores of its machine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdecimal() else 1, engines, 1)
    return max(1, min(MAX_WORKERS, share))
