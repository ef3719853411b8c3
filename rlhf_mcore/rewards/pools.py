"""What works on items for graders and functions: worker processes beside a rank or under Ray, or a server. An item is a JSON text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_mcore.rewards.pool import WorkerPool

MAX_LOST_IN_A_ROW = 10  # after so many items without an answer, the others would be waited for in vain
MAX_WORKERS = 8  # by default; a function that waits for a server wants more

Verdict = tuple[float, "str | None"]  # a grade, and why there is none: timeout | error


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a pool of workers may use."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # of each worker
    env: tuple[str, ...] = ()  # names of variables that workers get beside ``process.ENVIRONMENT``
    retries: int = 1  # of an item whose worker has ended or was killed, each on a fresh one

    @property
    def memory_bytes(self) -> int:
        """Of each worker, as the kernel can have it."""
        return int(min(self.memory_gib * 2**30, 2.0**62))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pool returns for an item: an answer, or in ``lost`` the cause why there is none."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """Why there is no result; empty where there is one."""
        return self.lost or self.answer.get("error", "")


# Waits, and returns an outcome for each item, in order; None: the item was left.
Collect = Callable[[], "list[Outcome | None]"]


class Pool(Protocol):
    """Where items are worked on."""

    @property
    def close(self) -> Callable[[], Any]:
        """End what it has started. Who still waits gets an error."""
        ...

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items. With ``stop_at_failure`` the rest is left once an item has failed."""
        ...


# Name for messages, what is loaded with which options, limits -> a pool: ``local_pool``, or what makes Ray's.
Pools = Callable[[str, str, Mapping[str, Any], WorkerLimits], "WorkerPool"]


def local_pool(name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
    """Make a pool of worker processes beside this one. Its module is imported when something asks for it."""
    from rlhf_mcore.rewards.pool import WorkerPool

    return WorkerPool(name, kind, options, limits)


def default_workers(engines: int = 1) -> int:
    """Return this rank's, or one engine's, share of the cores of its machine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdecimal() else 1, engines, 1)
    return max(1, min(MAX_WORKERS, share))


class NoResults(ConfigError):
    """So many responses in a row got no result that more would get none. ``timed_out``: the last of them took too long."""

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out
