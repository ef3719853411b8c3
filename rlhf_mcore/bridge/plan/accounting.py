"""Bytes of every rank of a plan, counted over whole sets of ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.plan.routes import Ranks
from rlhf_mcore.bridge.plan.schedule import Deal, Schedule, Unit

Bytes = NDArray[np.int64]


@dataclass(slots=True)
class PlanBytes:
    """Arrays over ranks, in bytes. A rank that needs an element twice receives it once.

    ``lower_bound`` is what a rank needs and does not hold: no plan can receive less. ``imported`` is the part of ``received`` that
    crosses nodes. ``peak_sent`` and ``peak_received`` are those of the rank's largest bucket.
    """

    received: Bytes
    sent: Bytes
    local: Bytes
    lower_bound: Bytes
    imported: Bytes
    peak_sent: Bytes
    peak_received: Bytes

    def peak(self, depth: int) -> int:
        """Upper bound on the buffers of any rank with ``depth`` buckets in flight, at most 2 * depth * bucket."""
        return depth * int((self.peak_sent + self.peak_received).max(initial=0))


def count_bytes(schedule: Schedule) -> PlanBytes:
    """Exact bytes of every rank."""
    size = schedule.sets.world_size
    total = PlanBytes(*(np.zeros(size, dtype=np.int64) for _ in range(7)))
    for units in schedule.buckets:
        sent, received = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for deal, first, count in _runs(units):
            received[deal.route.receivers] += deal.nbytes * count
            if len(deal.route.far):
                imported = _add_far(sent, deal, first, count)
                total.imported[deal.route.far] += imported
            if len(deal.route.near):
                _add_near(sent, deal, first, count)
        total.sent += sent
        total.received += received
        np.maximum(total.peak_sent, sent, out=total.peak_sent)
        np.maximum(total.peak_received, received, out=total.peak_received)
    _add_bounds(total, schedule)
    return total


def _runs(units: list[Unit]) -> Iterator[tuple[Deal, int, int]]:
    """The deals of a bucket, each with its first position and its number of positions, which are consecutive."""
    firsts: dict[int, Unit] = {}
    counts: dict[int, int] = {}
    for unit in units:
        firsts.setdefault(id(unit.pattern), unit)
        counts[id(unit.pattern)] = counts.get(id(unit.pattern), 0) + 1
    for key, unit in firsts.items():
        for deal in unit.pattern.deals:
            yield deal, deal.base + unit.number * len(deal.cells), counts[key] * len(deal.cells)


def _dealt(candidates: Ranks, seats: Ranks | int, first: Ranks | int, cards: Ranks | int) -> Ranks:
    """How many of ``cards`` consecutive cards, the first going to seat ``first``, each candidate's seat gets."""
    full, rest = np.divmod(cards, seats)
    counts: Ranks = full + ((candidates - first) % seats < rest)
    return counts


def _add_far(sent: Bytes, deal: Deal, first: int, count: int) -> Bytes:
    """Adds what holders send to importing nodes and what importers forward; returns what each of ``route.far`` imports."""
    route, groups = deal.route, deal.route.imports
    holders = np.arange(len(route.holders))
    sent[route.holders] += deal.nbytes * _dealt(holders, len(holders), first * len(groups), count * len(groups))
    imported = deal.nbytes * _dealt(groups.ordinals, groups.company, first, count)
    sent[route.far] += imported * (groups.company - 1)
    return imported


def _add_near(sent: Bytes, deal: Deal, first: int, count: int) -> None:
    """Adds what holders send to ranks of their own node."""
    near = deal.route.near_holders
    each = near.spread(deal.route.near_receivers.sizes)
    sent[near.ranks] += deal.nbytes * _dealt(near.ordinals, near.company, first * each, count * each)


def _add_bounds(total: PlanBytes, schedule: Schedule) -> None:
    """What each rank needs, less what it holds, from the cells alone."""
    seen: dict[int, Unit] = {id(unit.pattern): unit for units in schedule.buckets for unit in units}
    needed = np.zeros_like(total.local)
    for unit in seen.values():
        for deal in unit.pattern.deals:
            nbytes = deal.nbytes * len(deal.cells) * unit.pattern.count
            needers, holders = schedule.sets.union(deal.needer_sets), schedule.sets.union(deal.holder_sets)
            needed[needers] += nbytes
            total.local[np.intersect1d(needers, holders, assume_unique=True)] += nbytes
    total.lower_bound += needed - total.local
