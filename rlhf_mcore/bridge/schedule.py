"""The part of a plan that all ranks share: which cells travel, in which order, in which bucket, and their positions in the deal.

Tensors whose pieces lie alike (the same matrix of all layers of a stage, all experts of a rank) share one pattern, which is worked
out once. A unit is a tensor, or a window of one that had to be cut to fit a bucket. Bucket limits are kept for the worst rank by
upper bounds that hold wherever in the deal a bucket begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.cells import Cell, Rectangle, bounding_box, clip, cut, halves
from rlhf_mcore.bridge.places import Place, RankSets
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.routes import Route

Entry = tuple[int, str, Piece]  # number of the rank set, buffer, piece
_Key = tuple[
    int,
    tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
    tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...],
]


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
    loads: list[NDArray[np.int64]] = field(default_factory=list)  # cumulative bounds for 0, 1, 2, ... consecutive units


@dataclass(slots=True)
class Unit:
    """A tensor, or a window of one. ``number`` counts the units of the same pattern."""

    hf_name: str
    start: tuple[int, ...]
    pattern: Pattern
    number: int
    sources: list[Entry]
    destinations: list[Entry]


@dataclass(slots=True)
class Tensor:
    """All pieces of one Hugging Face tensor."""

    item_bytes: int
    sources: list[Entry] = field(default_factory=list)
    destinations: list[Entry] = field(default_factory=list)


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
        self._set_bases()

    def _fill(self, tensors: Mapping[str, Tensor]) -> Iterator[list[Unit]]:
        bucket: list[Unit] = []
        load = self._no_load()
        numbers: dict[int, int] = {}  # units of a pattern in this bucket
        for name, tensor in tensors.items():
            for unit in self._units(name, tensor):
                more = self._increment(unit.pattern, numbers.get(id(unit.pattern), 0))
                if bucket and (load + more).max(initial=0) > self.bucket_bytes:
                    yield bucket
                    bucket, load, numbers = [], self._no_load(), {}
                    more = self._increment(unit.pattern, 0)
                load = load + more
                numbers[id(unit.pattern)] = numbers.get(id(unit.pattern), 0) + 1
                bucket.append(unit)
        if bucket:
            yield bucket

    def _units(self, name: str, tensor: Tensor) -> Iterator[Unit]:
        whole = self._pattern(tensor.item_bytes, tensor.sources, tensor.destinations, None, name)
        if self._increment(whole, 0).max(initial=0) <= self.bucket_bytes:
            start = (0,) * len(tensor.destinations[0][2].start)
            yield _unit(name, start, whole, tensor.sources, tensor.destinations)
            return
        box = bounding_box([(piece.start, piece.shape) for _, _, piece in tensor.destinations])
        for window in self._windows(name, tensor, box):
            sources, destinations = _inside(tensor.sources, window), _inside(tensor.destinations, window)
            pattern = self._pattern(tensor.item_bytes, sources, destinations, window, name)
            yield _unit(name, window[0], pattern, sources, destinations)

    def _windows(self, name: str, tensor: Tensor, window: Rectangle) -> Iterator[Rectangle]:
        """Cuts a window until each part fits a bucket, each time across the axis that spreads the load best."""
        if self._worst(name, tensor, window) <= self.bucket_bytes:
            if _inside(tensor.destinations, window):
                yield window
            return
        axes = [axis for axis, size in enumerate(window[1]) if size > 1]
        if not axes:
            raise ValueError(
                f"bucket_bytes is {self.bucket_bytes}, but the copies of a single element of {name} take "
                f"{self._worst(name, tensor, window)} bytes on one rank: make bucket_bytes larger"
            )
        parts = [halves(window, axis) for axis in axes]
        best = min(parts, key=lambda pair: max(self._worst(name, tensor, half) for half in pair))
        for half in best:
            yield from self._windows(name, tensor, half)

    def _worst(self, name: str, tensor: Tensor, window: Rectangle) -> int:
        sources, destinations = _inside(tensor.sources, window), _inside(tensor.destinations, window)
        if not destinations:
            return 0
        pattern = self._pattern(tensor.item_bytes, sources, destinations, window, name)
        return int(self._increment(pattern, 0).max(initial=0))

    def _pattern(
        self, item_bytes: int, sources: list[Entry], destinations: list[Entry], window: Rectangle | None, name: str
    ) -> Pattern:
        held, needed = _lying(sources, window), _lying(destinations, window)
        key = (item_bytes, held, needed)
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._new_pattern(key, name)
        return pattern

    def _new_pattern(self, key: _Key, name: str) -> Pattern:
        item_bytes, held, needed = key
        geometry = (tuple(entry[1:] for entry in held), tuple(entry[1:] for entry in needed))
        cells = self._geometries.get(geometry)
        if cells is None:
            cells = self._geometries[geometry] = cut(*geometry)
        deals: dict[tuple[frozenset[int], frozenset[int], int], Deal] = {}
        for cell in cells:
            if not cell.holders:
                raise ValueError(f"{name}: no source holds the elements from {cell.start} of shape {cell.shape}")
            have = frozenset(held[number][0] for number in cell.holders)
            want = frozenset(needed[number][0] for number in cell.needers)
            nbytes = item_bytes * prod(cell.shape)
            if (have, want, nbytes) not in deals:
                deals[have, want, nbytes] = Deal(self._route(have, want), nbytes, have, want)
            deals[have, want, nbytes].cells.append(cell)
        sets = frozenset(entry[0] for entry in (*held, *needed))
        return Pattern(item_bytes, list(deals.values()), sets, loads=[self._no_load()])

    def _route(self, have: frozenset[int], want: frozenset[int]) -> Route:
        if (have, want) not in self._routes:
            self._routes[have, want] = Route(self.sets.union(have), self.sets.union(want), self.ranks_per_node)
        return self._routes[have, want]

    def _no_load(self) -> NDArray[np.int64]:
        return np.zeros((2, len(self._profiles)), dtype=np.int64)

    def _increment(self, pattern: Pattern, number: int) -> NDArray[np.int64]:
        """What one unit more adds to the bounds [sent, received] of every profile, after ``number`` units in the bucket."""
        while len(pattern.loads) < number + 2:
            pattern.loads.append(self._load(pattern, len(pattern.loads)))
        more: NDArray[np.int64] = pattern.loads[number + 1] - pattern.loads[number]
        return more

    def _load(self, pattern: Pattern, count: int) -> NDArray[np.int64]:
        load = self._no_load()
        for deal in pattern.deals:
            total = count * len(deal.cells)
            holds = self._profiles[:, list(deal.holder_sets)].any(axis=1)
            receives = self._profiles[:, list(deal.needer_sets)].any(axis=1) & ~holds
            load[0] += deal.nbytes * (holds * deal.route.most_sent(total) + receives * deal.route.most_forwarded(total))
            load[1] += deal.nbytes * total * receives
        return load

    def _set_bases(self) -> None:
        """Lets each deal of a route go on where the one before it ends."""
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
    tensors = {name: Tensor(element_sizes[name]) for name in order}
    for place in sources:
        number = sets.number(place.ranks)
        for piece in place.pieces:
            if piece.hf_name in tensors:
                tensors[piece.hf_name].sources.append((number, place.buffer, piece))
    for place in destinations:
        number = sets.number(place.ranks)
        for piece in place.pieces:
            if piece.hf_name in tensors:
                tensors[piece.hf_name].destinations.append((number, place.buffer, piece))
    return {name: tensor for name, tensor in tensors.items() if tensor.destinations}, sets


def _unit(name: str, start: tuple[int, ...], pattern: Pattern, sources: list[Entry], destinations: list[Entry]) -> Unit:
    pattern.count += 1
    return Unit(name, start, pattern, pattern.count - 1, sources, destinations)


def _inside(entries: list[Entry], window: Rectangle) -> list[Entry]:
    return [entry for entry in entries if clip((entry[2].start, entry[2].shape), window) is not None]


def _lying(entries: list[Entry], window: Rectangle | None) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """Rank set, start and shape of entries, relative to a window that meets all of them."""
    if window is None:
        return tuple([(number, piece.start, piece.shape) for number, _, piece in entries])
    clipped = ((number, clip((piece.start, piece.shape), window)) for number, _, piece in entries)
    return tuple((number, *part) for number, part in clipped if part is not None)
