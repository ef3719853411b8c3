"""Plan a weight transfer: the rectangles that ranks send to each other, and the bucket of each rectangle.

Planning is pure arithmetic on descriptions: no tensors, process groups or communication. Ranks with equal
descriptions build equal plans (compare :attr:`Plan.digest`). Each rank computes its own part alone
(:meth:`Plan.rank_view`).
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from itertools import groupby, zip_longest

import numpy as np

from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.plan.rank_plan import RankPlan, build_rank_plan
from rlhf_mcore.bridge.plan.schedule import Schedule, gather_tensors

_FORMAT = b"rlhf_mcore bridge plan 1"


class Plan:
    """A transfer between two descriptions of the same tensors. :func:`build_plan` builds it."""

    def __init__(self, schedule: Schedule, sources: Sequence[Place], destinations: Sequence[Place]):
        self._schedule = schedule
        self._sources, self._destinations = sources, destinations

    @property
    def num_buckets(self) -> int:
        return len(self._schedule.buckets)

    @property
    def bucket_bytes(self) -> int:
        """Upper limit of the bytes that a rank sends per bucket. The same limit applies to received bytes."""
        return self._schedule.bucket_bytes

    @property
    def world_size(self) -> int:
        """The highest rank in the plan, plus 1."""
        return self._schedule.sets.world_size

    def rank_view(self, rank: int) -> RankPlan:
        """Return the copies and messages of ``rank``."""
        with _pause_collector():
            return build_rank_plan(self._schedule, rank)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that determines the plan. Ranks with equal digests send and receive matching messages."""
        schedule = self._schedule
        state = blake2b(_FORMAT, digest_size=16)
        state.update(np.array([schedule.bucket_bytes, *schedule.nodes], dtype="<i8").tobytes())
        for places in (self._sources, self._destinations):
            names = [f"{place.buffer} {' '.join([piece.hf_name for piece in place.pieces])}" for place in places]
            numbers = np.fromiter(_numbers(places), dtype="<i8")
            state.update(f"{len(places)} {len(numbers)}\n".encode() + "\n".join(names).encode())
            state.update(numbers.tobytes())
        names = [f"{unit.pattern.item_bytes} {unit.hf_name}" for units in schedule.buckets for unit in units]
        state.update("\n".join(names).encode())
        state.update(np.array([len(units) for units in schedule.buckets], dtype="<i8").tobytes())
        return state.hexdigest()


def build_plan(
    sources: Sequence[Place],
    destinations: Sequence[Place],
    *,
    element_sizes: Mapping[str, int],
    bucket_bytes: int,
    order: Sequence[str],
    nodes: Sequence[int] | None = None,
    only: Collection[str] | None = None,
) -> Plan:
    """Plan the transfer of every tensor that a destination needs.

    Args:
        sources: the places that hold tensors. Several ranks may hold the same elements, with equal or different
            tilings.
        destinations: the places that need tensors.
        element_sizes: bytes per element on the wire, by Hugging Face name: 1, 2, 4 or 8.
        bucket_bytes: limit of the bytes that a rank sends per bucket. The same limit applies to received bytes.
        order: Hugging Face names in sending order, usually network order.
        nodes: the node number of every rank. With it, a cell is sent to each node once and forwarded inside the
            node.
        only: the names of the tensors to transfer; None transfers all.

    Raises:
        ValueError: ``order`` misses a needed tensor, an element has no source, ``bucket_bytes`` is too small, or
            ``nodes`` misses a rank.
    """
    needed = {piece.hf_name for place in destinations for piece in place.pieces}
    transferred = needed if only is None else set(only)
    if missing := needed.difference(order):
        raise ValueError(f"order lacks {len(missing)} tensors that destinations need, among them {min(missing)}")
    if unknown := transferred.difference(needed):
        raise ValueError(f"only names {len(unknown)} tensors that no destination needs, among them {min(unknown)}")
    if bad := sorted({element_sizes[name] for name in needed} - {1, 2, 4, 8}):
        raise ValueError(f"element_sizes must be 1, 2, 4 or 8 bytes, got {bad}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    chosen = [name for name in dict.fromkeys(order) if name in transferred]
    with _pause_collector():
        tensors, sets = gather_tensors(sources, destinations, element_sizes, chosen)
        size = sets.world_size
        if nodes is not None and len(nodes) < size:
            raise ValueError(
                f"nodes has {len(nodes)} entries, but the plan includes rank {size - 1}; give the node of every rank"
            )
        each = np.arange(size) if nodes is None else np.array(nodes, dtype=np.int64)
        schedule = Schedule(tensors, sets, bucket_bytes, each)
    return Plan(schedule, sources, destinations)


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause the garbage collector.

    Planning creates hundreds of thousands of small objects and no cycles. Garbage collection would take a third of
    its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _numbers(places: Sequence[Place]) -> Iterator[int]:
    """Yield all numbers of a description, each list preceded by its length."""
    for place in places:
        ranks = place.ranks
        if isinstance(ranks, range):
            yield from (-1, ranks.start, ranks.stop, ranks.step)
        else:
            yield len(ranks)
            yield from ranks
        for piece in place.pieces:
            yield len(piece.start)
            yield piece.offset
            yield from piece.start
            yield from piece.shape
            yield from piece.strides


def spread_order(order: Sequence[str], sources: Sequence[Place], *, keep_layers: bool = True) -> list[str]:
    """Order tensors so that different owners alternate. Then more ranks send at the same time.

    With ``keep_layers`` owners alternate within a layer only (experts of one layer are on different ranks).
    Without it they alternate over the whole model, so all pipeline stages send at once. This suits engines that
    accept layers in any order.
    """
    owners: dict[str, dict[Sequence[int], None]] = defaultdict(dict)
    for place in sources:
        for piece in place.pieces:
            owners[piece.hf_name][place.ranks] = None
    spread = []
    for _, names in groupby(order, key=_layer if keep_layers else lambda _: ""):
        queues: dict[tuple[Sequence[int], ...], list[str]] = defaultdict(list)
        for name in names:
            queues[tuple(owners[name])].append(name)
        for turn in zip_longest(*queues.values()):
            spread += [name for name in turn if name is not None]
    return spread


def _layer(name: str) -> str:
    prefix = re.match(r"(?:.*\.)?layers\.\d+\.", name)
    return prefix.group() if prefix else name
