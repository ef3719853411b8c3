"""Replace a planned bridge or an engine in some runs: gathering bridge, partial sync, and empty engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf_mcore.protocols import SyncStats, WeightTarget

if TYPE_CHECKING:
    from rlhf_mcore.bridge.files.gather import Gatherer


@dataclass(slots=True)
class GatherBridge:
    """Sync without a plan: every rank gathers every full tensor, one at a time, and the engine takes its part."""

    gatherer: Gatherer
    target: WeightTarget

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and set their version. This is a collective call over the model's ranks."""
        started, sizes = time.perf_counter(), [0]

        def count_bytes() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.gatherer:
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        self.target.load_weights(count_bytes(), version=version)
        return SyncStats(time.perf_counter() - started, sum(sizes), 0, max(sizes))


class NoTarget:
    """Placeholder for the engine on a rank without one. The rank only sends weights to others."""

    policy_version = 0

    def __init__(self) -> None:
        self.model = nn.Module()

    @contextmanager
    def begin(self, version: int) -> Iterator[nn.Module]:
        yield self.model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        for _ in weights:  # gathering is collective
            pass

    def abandon(self, problem: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ChangedOnlyBridge:
    """Send only the tensors that change, once ``target`` has the other tensors.

    ``sync_some`` is :meth:`PlannedBridge.sync` of a bridge. It sends the given tensors; None: all.
    """

    sync_some: Callable[[int, Sequence[str] | None], SyncStats]
    target: WeightTarget
    changed: Sequence[str]

    def sync(self, version: int) -> SyncStats:
        """See :class:`WeightBridge`."""
        return self.sync_some(version, None if self.target.policy_version < 0 else self.changed)


def matching(
    only: Sequence[str],
    known: Collection[str],
    aliases: Mapping[str, str],
    together: Sequence[frozenset[str]] = (),
) -> frozenset[str]:
    """Resolve names and patterns to tensors of the model, and add the tensors that must be sent together with them.

    ``aliases`` maps names of tied tensors.

    Raises:
        ValueError: a pattern matches no tensor.
    """
    names: set[str] = set()
    every = {*known, *aliases}
    for pattern in only:  # fast path: thousands of plain names are not patterns
        matching = [pattern] if pattern in every else [name for name in every if fnmatchcase(name, pattern)]
        matched = {aliases.get(name, name) for name in matching}
        if not matched:
            raise ValueError(f"sync(only=...): {pattern!r} matches no tensor of the model, such as {next(iter(known))}")
        names |= matched
    if not names:
        raise ValueError("sync(only=[]) names no tensor; None means all")
    while more := {name for layer in together if layer & names for name in layer} - names:
        names |= more
    return frozenset(names)
