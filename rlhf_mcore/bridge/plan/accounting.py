"""Bytes of every rank of a plan, counted over whole sets of ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.plan.routes import Ranks
from rlhf_mcore.bridge.plan.schedule import CellGroup, Schedule, Unit

Bytes = NDArray[np.int64]


@dataclass(slots=True)
class PlanBytes:
    """Arrays over ranks, in bytes. A rank that needs an element twice receives it once.

    ``lower_bound`` is what a rank needs and does not hold: no plan can receive less. ``imported`` is the part of ``received`` that
    crosses nodes, ``exported`` that of ``sent``. ``peak_sent`` and ``peak_received`` are those of the rank's largest bucket.
    """

    received: Bytes
    sent: Bytes
    local: Bytes
    lower_bound: Bytes
    imported: Bytes
    exported: Bytes
    peak_sent: Bytes
    peak_received: Bytes

    def peak(self, depth: int) -> int:
        """Upper bound on the buffers of any rank with ``depth`` buckets in flight, at most 2 * depth * bucket."""
        return depth * int((self.peak_sent + self.peak_received).max(initial=0))


def count_bytes(schedule: Schedule) -> PlanBytes:
    """Exact bytes of every rank."""
    size = schedule.sets.world_size
    total = PlanBytes(*(np.zeros(size, dtype=np.int64) for _ in range(8)))
    for units in schedule.buckets:
        sent, received = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for group, first, turns in _runs(units):
            received[group.route.receivers] += group.nbytes * turns
            if len(group.route.far):
                _add_far(total, sent, group, first, turns)
            if len(group.route.near):  # what holders send to ranks of their own node
                near = group.route.near_holders
                each = near.spread(group.route.near_receivers.sizes)
                counts = _round_robin(near.local_ranks, near.local_sizes, first * each, turns * each)
                sent[near.ranks] += group.nbytes * counts
        total.sent += sent
        total.received += received
        np.maximum(total.peak_sent, sent, out=total.peak_sent)
        np.maximum(total.peak_received, received, out=total.peak_received)
    _add_bounds(total, schedule)
    return total


def _runs(units: list[Unit]) -> Iterator[tuple[CellGroup, int, int]]:
    """The groups of cells of a bucket, each with its first turn and its number of turns, which are consecutive."""
    firsts: dict[int, Unit] = {}
    counts: dict[int, int] = {}
    for unit in units:
        firsts.setdefault(id(unit.pattern), unit)
        counts[id(unit.pattern)] = counts.get(id(unit.pattern), 0) + 1
    for key, unit in firsts.items():
        for group in unit.pattern.groups:
            yield group, group.first_turn + unit.number * len(group.cells), counts[key] * len(group.cells)


def _round_robin(members: Ranks, size: Ranks | int, first: Ranks | int, turns: Ranks | int) -> Ranks:
    """How many of ``turns`` consecutive turns each of ``members`` has, of ``size`` that take turns; ``first`` counts turns before."""
    full, rest = np.divmod(turns, size)
    counts: Ranks = full + ((members - first) % size < rest)
    return counts


def _add_far(total: PlanBytes, sent: Bytes, group: CellGroup, first: int, turns: int) -> None:
    """Adds what holders send to importing nodes, what these import, and what importers forward."""
    route, nodes = group.route, group.route.imports
    holders = np.arange(len(route.holders))
    exported = group.nbytes * _round_robin(holders, len(holders), first * len(nodes), turns * len(nodes))
    imported = group.nbytes * _round_robin(nodes.local_ranks, nodes.local_sizes, first, turns)
    total.exported[route.holders] += exported
    total.imported[nodes.ranks] += imported
    sent[route.holders] += exported
    sent[nodes.ranks] += imported * (nodes.local_sizes - 1)


def _add_bounds(total: PlanBytes, schedule: Schedule) -> None:
    """What each rank needs, less what it holds, from the cells alone."""
    seen: dict[int, Unit] = {id(unit.pattern): unit for units in schedule.buckets for unit in units}
    needed = np.zeros_like(total.local)
    for unit in seen.values():
        for group in unit.pattern.groups:
            nbytes = group.nbytes * len(group.cells) * unit.pattern.count
            needers, holders = schedule.sets.union(group.needer_sets), schedule.sets.union(group.holder_sets)
            needed[needers] += nbytes
            total.local[np.intersect1d(needers, holders, assume_unique=True)] += nbytes
    total.lower_bound += needed - total.local
