"""Count the bytes of every rank of a plan, for whole sets of ranks at once. Tests, benchmarks and tools use this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.plan.build import Plan
from rlhf_mcore.bridge.plan.rank_plan import RankPlan
from rlhf_mcore.bridge.plan.routes import NodeGroups, Ranks, Route
from rlhf_mcore.bridge.plan.schedule import Schedule, Unit

Bytes = NDArray[np.int64]
_BLOCK = 256  # buckets per counting step


@dataclass(slots=True)
class PlanBytes:
    """Arrays over ranks, in bytes. A rank that needs an element twice receives it once.

    ``lower_bound`` counts the elements that a rank needs and does not hold. No plan can receive less. ``imported`` is the part of
    ``received`` that crosses nodes, and ``exported`` the same part of ``sent``. ``peak_sent`` and ``peak_received`` are maxima over
    buckets.
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
        """Return a bound for the buffers of any rank with ``depth`` buckets in flight, at most 2 * depth * bucket."""
        return depth * int((self.peak_sent + self.peak_received).max(initial=0))


def peak_bytes(plan: RankPlan, depth: int = 1) -> int:
    """Return the peak bytes of send and receive buffers with ``depth`` consecutive buckets in flight."""
    sizes = [bucket.send_bytes + bucket.receive_bytes for bucket in plan.buckets]
    return max((sum(sizes[i : i + depth]) for i in range(len(sizes))), default=0)


def count_bytes(plan: Plan) -> PlanBytes:
    """Count the exact bytes of every rank."""
    schedule = plan._schedule
    size = schedule.sets.world_size
    total = PlanBytes(*(np.zeros(size, dtype=np.int64) for _ in range(8)))
    for first in range(0, len(schedule.buckets), _BLOCK):
        _count_block(total, schedule.buckets[first : first + _BLOCK])
    _add_bounds(total, schedule)
    return total


def _count_block(total: PlanBytes, buckets: Sequence[Sequence[Unit]]) -> None:
    """Add the bytes sent and received in some buckets."""
    sent, received = np.zeros((2, len(buckets), len(total.sent)), dtype=np.int64)
    # Bytes in each bucket for every set of ranks that needs them. There are few such sets.
    needed: dict[int, tuple[Ranks, Bytes]] = {}
    for route, runs in _runs(buckets).values():
        bucket, *columns = np.array(runs, dtype=np.int64).T
        nbytes, first, turns = (column[:, None] for column in columns)
        begins = np.flatnonzero(np.diff(bucket, prepend=-1))
        rows = bucket[begins]
        volume = np.add.reduceat(nbytes * turns, begins)
        needed.setdefault(id(route.needers), (route.needers, np.zeros(len(buckets), dtype=np.int64)))[1][rows] += (
            volume[:, 0]
        )
        received[np.ix_(rows, route.keepers)] -= volume
        if len(route.far):  # holders send to importing nodes, whose importers forward
            nodes, holders = route.imports, np.arange(len(route.holders))
            exported = nbytes * _round_robin(holders, len(holders), first * len(nodes), turns * len(nodes))
            total.exported[route.holders] += exported.sum(axis=0)
            sent[np.ix_(rows, route.holders)] += np.add.reduceat(exported, begins)
            local_ranks, local_sizes = _places_in_nodes(nodes)
            for size in nodes.distinct_sizes:
                mask = local_sizes == size
                ranks, places = nodes.ranks[mask], local_ranks[mask]
                imported = np.add.reduceat(nbytes * _round_robin(np.arange(size), size, first, turns), begins)
                total.imported[ranks] += imported.sum(axis=0)[places]
                if size > 1:
                    sent[np.ix_(rows, ranks)] += (size - 1) * imported[:, places]
        if len(route.near):  # holders send to ranks of their own node
            near = route.near_holders
            each = np.repeat(route.near_receivers.sizes, near.sizes)
            copies = _round_robin(*_places_in_nodes(near), first * each, turns * each)
            sent[np.ix_(rows, near.ranks)] += np.add.reduceat(nbytes * copies, begins)
    for needers, by_bucket in needed.values():
        received[:, needers] += by_bucket[:, None]
    total.sent += sent.sum(axis=0)
    total.received += received.sum(axis=0)
    np.maximum(total.peak_sent, sent.max(axis=0), out=total.peak_sent)
    np.maximum(total.peak_received, received.max(axis=0), out=total.peak_received)


def _places_in_nodes(nodes: NodeGroups) -> tuple[Ranks, Ranks]:
    """Return, for each rank, its index within its node, and the number of ranks of its node."""
    return np.arange(len(nodes.ranks)) - np.repeat(nodes.starts, nodes.sizes), np.repeat(nodes.sizes, nodes.sizes)


def _runs(buckets: Sequence[Sequence[Unit]]) -> dict[int, tuple[Route, list[tuple[int, int, int, int]]]]:
    """Collect the load of the cells of every route in each bucket.

    An entry is (bucket, bytes of a cell, first turn, number of consecutive turns).
    """
    runs: dict[int, tuple[Route, list[tuple[int, int, int, int]]]] = {}
    for bucket, units in enumerate(buckets):
        firsts: dict[int, Unit] = {}
        counts: dict[int, int] = {}
        for unit in units:
            firsts.setdefault(id(unit.pattern), unit)
            counts[id(unit.pattern)] = counts.get(id(unit.pattern), 0) + 1
        for key, unit in firsts.items():
            for group in unit.pattern.groups:
                turns = len(group.cells)
                run = (bucket, group.nbytes, group.first_turn + unit.number * turns, counts[key] * turns)
                runs.setdefault(id(group.route), (group.route, []))[1].append(run)
    return runs


def _round_robin(members: Ranks, size: Ranks | int, first: Ranks | int, turns: Ranks | int) -> Ranks:
    """Return the share of each of ``members`` in ``turns`` consecutive turns among ``size`` members, after ``first`` turns."""
    full, rest = np.divmod(turns, size)
    counts: Ranks = full + ((members - first) % size < rest)
    return counts


def _add_bounds(total: PlanBytes, schedule: Schedule) -> None:
    """Add the bytes that each rank needs and does not hold, from the cells alone."""
    patterns = {id(unit.pattern): unit.pattern for units in schedule.buckets for unit in units}
    needed = np.zeros_like(total.local)
    for pattern in patterns.values():
        for group in pattern.groups:
            nbytes = group.nbytes * len(group.cells) * pattern.count
            needers, holders = schedule.sets.union(group.needer_sets), schedule.sets.union(group.holder_sets)
            needed[needers] += nbytes
            total.local[np.intersect1d(needers, holders, assume_unique=True)] += nbytes
    total.lower_bound += needed - total.local
