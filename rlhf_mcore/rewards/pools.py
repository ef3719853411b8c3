"""Where the items of graders and functions are worked on: worker processes beside a rank, or under Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlhf_mcore.rewards.pool import Outcome, WorkerLimits


class Submitted(Protocol):
    """Items that are being worked on."""

    def outcomes(self) -> list[Outcome | None]:
        """Wait. One outcome per item, in order; None: it was left."""
        ...


class Pool(Protocol):
    """Where items are worked on, each a JSON text."""

    @property
    def close(self) -> Callable[[], Any]:
        """Ends what it has started."""
        ...

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Submitted:
        """Begin with items. With ``stop_at_failure`` the rest is left once an item has failed."""
        ...


class CheckedPool(Pool, Protocol):
    """A pool that loads something."""

    def check(self) -> None:
        """Find out now whether it can be loaded. Raises ConfigError where it cannot."""
        ...


# Name for messages, what is loaded with which options, limits -> a pool: ``local_pool``, or what makes Ray's.
Pools = Callable[[str, str, Mapping[str, Any], "WorkerLimits"], CheckedPool]


def local_pool(name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> CheckedPool:
    """Make a pool of worker processes beside this one. Its module is imported when something asks for it."""
    from rlhf_mcore.rewards.pool import WorkerPool

    return WorkerPool(name, kind, options, limits)
