"""Items for workers beside a rank, under Ray or of a server, and what becomes of them. An item is a JSON text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError

MAX_LOST_IN_A_ROW = 10  # after so many items without an answer, the others would be waited for in vain


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bound what a pool of workers uses."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # of each worker
    env: tuple[str, ...] = ()  # names of variables that workers get beside ``process.ENVIRONMENT``
    retries: int = 1  # of an item whose worker has ended or was killed, each on a fresh one

    @property
    def memory_bytes(self) -> int:
        """Return the memory of each worker, as the kernel can have it."""
        return int(min(self.memory_gib * 2**30, 2.0**62))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold what a pool returns for an item: an answer, or in ``lost`` the cause why there is none."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False

    @property
    def problem(self) -> str:
        """Return why there is no result; empty where there is one."""
        return self.lost or self.answer.get("error", "")


# Waits, and returns an outcome for each item, in order; None: the item was left.
Collect = Callable[[], "list[Outcome | None]"]


class Pool(Protocol):
    """Work on items."""

    @property
    def close(self) -> Callable[[], Any]:
        """End what it has started. Who still waits gets an error."""
        ...

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items. With ``stop_at_failure`` the rest is left once an item has failed."""
        ...


class NoResults(ConfigError):
    """So many responses in a row got no result that more would get none. ``timed_out``: the last of them took too long."""

    def __init__(self, message: str, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out
