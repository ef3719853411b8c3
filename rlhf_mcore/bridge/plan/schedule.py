"""The part of a plan that all ranks share: which cells travel, in which order, in which bucket, and their positions in the deal.

Tensors whose pieces lie alike (the same matrix of all layers of a stage, all experts of a rank) share one pattern, which is worked
out once. A unit is a tensor, or a window of one that had to be cut to fit a bucket. Bucket limits are kept for the worst rank by
upper bounds that hold wherever in the deal a bucket begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.map.cells import Cell, Rectangle, bounding_box, clip, cut, slabs
from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.plan.routes import RankSets, Route

Entries = list[
    Any
]  # flat, three items each: number of the rank set, buffer, piece. Tuples would keep the garbage collector busy
Load = NDArray[np.int64]  # [2 * profiles]: bytes sent, then bytes received, by ranks of each profile
_Key = tuple[int, Any, Any, Any, Any, Any, Any]


@dataclass(slots=True, eq=False)
class Deal:
    """The cells of a pattern that share a route and a size: they are dealt together, ``len(cells)`` positions per unit."""

    route: Route
    nbytes: int
    holder_sets: frozenset[int]
    needer_sets: frozenset[int]
    cells: list[Cell] = field(default_factory=list)
    base: int = 0  # position of the first cell of the pattern's first unit


@dataclass(slots=True, eq=False)
class Pattern:
    """What tensors have in common whose pieces lie alike on the same ranks."""

    item_bytes: int
    deals: list[Deal]
    sets: frozenset[int]
    count: int = 0  # units of this pattern
    loads: list[Load] = field(default_factory=list)  # what the n-th of consecutive units adds to the bounds
    total: Load = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # the sum of ``loads``
    windows: list[Rectangle] | None = None  # how a tensor of this layout is cut to fit a bucket


@dataclass(slots=True)
class Unit:
    """A tensor, or a window of one from ``start``. ``number`` counts the units of the same pattern."""

    hf_name: str
    start: tuple[int, ...] | None  # None: the whole tensor
    pattern: Pattern
    number: int
    sources: Entries
    destinations: Entries


@dataclass(slots=True)
class Tensor:
    """All pieces of one Hugging Face tensor."""

    item_bytes: int
    sources: Entries = field(default_factory=list)
    destinations: Entries = field(default_factory=list)


class Schedule:
    """Units in buckets. Equal on every rank that builds it from equal descriptions.

    Raises:
        ValueError: a needed element has no source, or one element's messages do not fit a bucket.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sets: RankSets, bucket_bytes: int, ranks_per_node: int):
        self.sets = sets
        self.bucket_bytes = bucket_bytes
        self.ranks_per_node = ranks_per_node
        self._profiles = sets.profiles()
        self._routes: dict[tuple[frozenset[int], frozenset[int]], Route] = {}
        self._geometries: dict[object, list[Cell]] = {}
        self._patterns: dict[_Key, Pattern] = {}
        self.buckets = list(self._fill(tensors))
        for units in self.buckets:  # larger elements first, so that messages need no padding to be aligned
            units.sort(key=lambda unit: -unit.pattern.item_bytes)
        self._set_bases()

    def _fill(self, tensors: Mapping[str, Tensor]) -> Iterator[list[Unit]]:
        bucket: list[Unit] = []
        load = self._no_load()
        numbers: dict[int, int] = defaultdict(int)  # units of a pattern in this bucket
        for name, tensor in tensors.items():
            for unit in self._units(name, tensor):
                key = id(unit.pattern)
                more = load + self._added(unit.pattern, numbers[key])
                if bucket and np.maximum.reduce(more) > self.bucket_bytes:
                    yield bucket
                    bucket = []
                    numbers.clear()
                    more = self._added(unit.pattern, 0)
                load = more
                numbers[key] += 1
                bucket.append(unit)
        if bucket:
            yield bucket

    def _units(self, name: str, tensor: Tensor) -> Iterator[Unit]:
        whole = self._pattern(name, tensor)
        if whole.windows is None:
            whole.windows = [] if self._fits(whole) else list(self._cut(name, tensor))
        if not whole.windows:
            yield _unit(name, None, whole, tensor)
        for window in whole.windows:
            part = _inside(tensor, window)
            yield _unit(name, window[0], self._pattern(name, part, window), part)

    def _cut(self, name: str, tensor: Tensor) -> Iterator[Rectangle]:
        """Windows of a tensor that fit a bucket each."""
        box = bounding_box([(piece.start, piece.shape) for piece in tensor.destinations[2::3]])
        work = [box]
        while work:
            window = work.pop()
            part = _inside(tensor, window)
            if not part.destinations:
                continue
            worst = self._worst(name, tensor, window)
            if worst <= self.bucket_bytes:
                yield window
            else:
                axis = self._best_axis(name, tensor, window, worst)
                work.extend(reversed(slabs(window, axis, -(-worst // self.bucket_bytes))))

    def _best_axis(self, name: str, tensor: Tensor, window: Rectangle, worst: int) -> int:
        """The axis across which a cut spreads the load over most ranks."""
        axes = [axis for axis, size in enumerate(window[1]) if size > 1]
        if not axes:
            raise ValueError(
                f"bucket_bytes is {self.bucket_bytes}, but the copies of a single element of {name} take "
                f"{worst} bytes on one rank: make bucket_bytes larger"
            )
        return min(axes, key=lambda axis: max(self._worst(name, tensor, half) for half in slabs(window, axis, 2)))

    def _worst(self, name: str, tensor: Tensor, window: Rectangle) -> int:
        part = _inside(tensor, window)
        return int(self._added(self._pattern(name, part, window), 0).max()) if part.destinations else 0

    def _fits(self, pattern: Pattern) -> bool:
        return bool(self._added(pattern, 0).max() <= self.bucket_bytes)

    def _pattern(self, name: str, tensor: Tensor, window: Rectangle | None = None) -> Pattern:
        key = (tensor.item_bytes, *_lying(tensor.sources, window), *_lying(tensor.destinations, window))
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._new_pattern(key, name)
        return pattern

    def _new_pattern(self, key: _Key, name: str) -> Pattern:
        item_bytes, held, needed = key[0], key[1], key[4]
        geometry = key[2:4] + key[5:7]
        cells = self._geometries.get(geometry)
        if cells is None:
            rectangles = [list(zip(*pair, strict=True)) for pair in (key[2:4], key[5:7])]
            cells = self._geometries[geometry] = cut(*rectangles)
        deals: dict[tuple[frozenset[int], frozenset[int], int], Deal] = {}
        for cell in cells:
            if not cell.holders:
                raise ValueError(f"{name}: no source holds the elements from {cell.start} of shape {cell.shape}")
            have = frozenset(held[number] for number in cell.holders)
            want = frozenset(needed[number] for number in cell.needers)
            nbytes = item_bytes * prod(cell.shape)
            if (have, want, nbytes) not in deals:
                deals[have, want, nbytes] = Deal(self._route(have, want), nbytes, have, want)
            deals[have, want, nbytes].cells.append(cell)
        return Pattern(item_bytes, list(deals.values()), frozenset(held) | frozenset(needed))

    def _route(self, have: frozenset[int], want: frozenset[int]) -> Route:
        if (have, want) not in self._routes:
            self._routes[have, want] = Route(self.sets.union(have), self.sets.union(want), self.ranks_per_node)
        return self._routes[have, want]

    def _no_load(self) -> Load:
        return np.zeros(2 * len(self._profiles), dtype=np.int64)

    def _added(self, pattern: Pattern, number: int) -> Load:
        """What one unit more adds to the bounds [sent, received] of every profile, after ``number`` units in the bucket."""
        while len(pattern.loads) <= number:
            total = self._load(pattern, len(pattern.loads) + 1)
            pattern.loads.append(total - pattern.total if pattern.loads else total)
            pattern.total = total
        return pattern.loads[number]

    def _load(self, pattern: Pattern, count: int) -> Load:
        load = self._no_load()
        sent, received = np.split(load, 2)
        for deal in pattern.deals:
            total = count * len(deal.cells)
            holds = self._profiles[:, list(deal.holder_sets)].any(axis=1)
            receives = self._profiles[:, list(deal.needer_sets)].any(axis=1) & ~holds
            sent += deal.nbytes * (holds * deal.route.most_sent(total) + receives * deal.route.most_forwarded(total))
            received += deal.nbytes * total * receives
        return load

    def _set_bases(self) -> None:
        """Lets each deal of a route begin where the one before it ends."""
        ends: dict[int, int] = {}
        for pattern in self._patterns.values():
            for deal in pattern.deals:
                deal.base = ends.get(id(deal.route), 0)
                ends[id(deal.route)] = deal.base + pattern.count * len(deal.cells)


def gather_tensors(
    sources: Sequence[Place], destinations: Sequence[Place], element_sizes: Mapping[str, int], order: Sequence[str]
) -> tuple[dict[str, Tensor], RankSets]:
    """All pieces by tensor, for the tensors of ``order`` that a destination needs, and the rank sets that hold them."""
    sets = RankSets()
    held, needed = _by_tensor(sources, order, sets), _by_tensor(destinations, order, sets)
    tensors = {name: Tensor(element_sizes[name], held[name], needed[name]) for name in order if needed[name]}
    return tensors, sets


def _by_tensor(places: Sequence[Place], order: Sequence[str], sets: RankSets) -> dict[str, Entries]:
    """Entries of the tensors of ``order``. The one loop over all pieces of all places, so it is kept lean."""
    found: dict[str, Entries] = {name: [] for name in order}
    find = found.get
    for place in places:
        number, buffer = sets.number(place.ranks), place.buffer
        for piece in place.pieces:
            entries = find(piece.hf_name)
            if entries is not None:
                entries += (number, buffer, piece)
    return found


def _unit(name: str, start: tuple[int, ...] | None, pattern: Pattern, tensor: Tensor) -> Unit:
    pattern.count += 1
    return Unit(name, start, pattern, pattern.count - 1, tensor.sources, tensor.destinations)


def _inside(tensor: Tensor, window: Rectangle) -> Tensor:
    """The entries that meet a window."""
    part = Tensor(tensor.item_bytes)
    for entries, kept in ((tensor.sources, part.sources), (tensor.destinations, part.destinations)):
        for at in range(0, len(entries), 3):
            if clip((entries[at + 2].start, entries[at + 2].shape), window) is not None:
                kept += entries[at : at + 3]
    return part


def _lying(entries: Entries, window: Rectangle | None) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Rank sets, starts and shapes of entries, relative to a window that meets all of them."""
    pieces = entries[2::3]
    if window is None:
        return tuple(entries[::3]), tuple([piece.start for piece in pieces]), tuple([piece.shape for piece in pieces])
    parts = [clip((piece.start, piece.shape), window) for piece in pieces]
    inside = [part for part in parts if part is not None]
    assert len(inside) == len(parts)
    return tuple(entries[::3]), tuple([start for start, _ in inside]), tuple([shape for _, shape in inside])
