"""Schedule the cells of a plan, equally on all ranks: their order, their bucket and their senders.

If tensors have the same rectangles on the same ranks, they share a pattern, which is computed once. Examples are
the same matrix of all layers in a stage, or all experts of a rank. A unit is a tensor, or a window of a tensor
that was cut to fit a bucket. Upper bounds keep the bucket limits for the worst rank. The bounds hold for any first
sender in a bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.map.pieces import Cell, Index, Piece, Place, Rectangle, bounding_box, cut_into_cells
from rlhf_mcore.bridge.plan.routes import Ranks, RankSets, Route

Load = NDArray[np.int64]  # [2 * profiles]: bytes sent, then bytes received, per rank of each profile
# A tensor's pieces on one side: numbers of their rank sets, starts, shapes.
_Tiling = tuple[tuple[int, ...], tuple[Index, ...], tuple[Index, ...]]
_Key = tuple[int, _Tiling, _Tiling]  # bytes per element, sources, destinations


@dataclass(slots=True)
class PlacedPieces:
    """The pieces of one tensor on one side, in three columns: number of the rank set, buffer and piece.

    One object per row would keep the garbage collector busy, because there are hundreds of thousands of rows.
    """

    sets: list[int] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def tiling(self) -> _Tiling:
        """Return the rectangles in the tensor's coordinates."""
        pieces = self.pieces
        return tuple(self.sets), tuple([piece.start for piece in pieces]), tuple([piece.shape for piece in pieces])

    def clipped_to(self, window: Rectangle) -> tuple[Sequence[int], _Tiling]:
        """Clip the pieces to a window.

        Return the numbers of intersecting pieces, and their parts relative to the window's start.
        """
        parts = [piece.rectangle.clipped_to(window) for piece in self.pieces]
        inside = [number for number, part in enumerate(parts) if part is not None]
        starts, shapes = zip(*(part for part in parts if part is not None), strict=True) if inside else ((), ())
        return inside, (tuple([self.sets[number] for number in inside]), starts, shapes)


@dataclass(slots=True)
class TensorPieces:
    """All pieces of one Hugging Face tensor."""

    item_bytes: int
    sources: PlacedPieces
    destinations: PlacedPieces


@dataclass(slots=True, eq=False)
class CellGroup:
    """The cells of a pattern with the same route and size. Their senders take turns: ``len(cells)`` turns per unit."""

    route: Route
    nbytes: int
    holder_sets: frozenset[int]
    needer_sets: frozenset[int]
    cells: list[Cell] = field(default_factory=list)
    first_turn: int = 0  # turn of the first cell in the pattern's first unit


@dataclass(slots=True, eq=False)
class Pattern:
    """The cells of tensors with the same rectangles on the same ranks, and the load that one such tensor adds to a bucket."""

    item_bytes: int
    groups: list[CellGroup]
    sets: frozenset[int]
    count: int = 0  # units of this pattern
    loads: list[Load] = field(default_factory=list)  # entry n: bytes that the n-th consecutive unit adds to the bounds
    total: Load = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # sum of ``loads``
    windows: list[Window] = field(default_factory=list)  # windows that cut a tensor of this pattern to fit buckets


@dataclass(slots=True, eq=False)
class Window:
    """A window that fits a bucket, for all tensors of a pattern: whole tensors, or the part at ``start`` with its own pattern.

    ``sources`` and ``destinations`` number the tensors' pieces that intersect the window.
    """

    start: Index | None  # None: the whole tensor
    pattern: Pattern
    sources: Sequence[int]
    destinations: Sequence[int]


@dataclass(slots=True)
class Unit:
    """A window of a tensor. ``number`` counts the units of the same pattern."""

    hf_name: str
    tensor: TensorPieces
    window: Window
    number: int

    @property
    def pattern(self) -> Pattern:
        return self.window.pattern


class Schedule:
    """Units in buckets. Equal on every rank that builds it from equal descriptions.

    Raises:
        ValueError: a needed element has no source, or one element's messages do not fit a bucket.
    """

    def __init__(self, tensors: Mapping[str, TensorPieces], sets: RankSets, bucket_bytes: int, nodes: Ranks):
        self.sets = sets
        self.bucket_bytes = bucket_bytes
        self.nodes = nodes
        self._profiles = sets.profiles()
        self._routes: dict[tuple[frozenset[int], frozenset[int]], Route] = {}
        self._geometries: dict[object, list[Cell]] = {}
        self._patterns: dict[_Key, Pattern] = {}
        self._members: dict[frozenset[int], NDArray[np.bool_]] = {}
        self.buckets = list(self._fill(tensors))
        for units in self.buckets:  # larger elements first, so that messages are aligned without padding
            units.sort(key=lambda unit: -unit.pattern.item_bytes)
        self._set_first_turns()

    def _fill(self, tensors: Mapping[str, TensorPieces]) -> Iterator[list[Unit]]:
        bucket: list[Unit] = []
        load = self._no_load()
        numbers: dict[int, int] = defaultdict(int)  # units of each pattern in this bucket
        for unit in self._in_turn(tensors):
            key = id(unit.pattern)
            more = load + self._load_of_next(unit.pattern, numbers[key])
            if bucket and np.maximum.reduce(more) > self.bucket_bytes:
                yield bucket
                bucket = []
                numbers.clear()
                more = self._load_of_next(unit.pattern, 0)
            load = more
            numbers[key] += 1
            bucket.append(unit)
        if bucket:
            yield bucket

    def _in_turn(self, tensors: Mapping[str, TensorPieces]) -> Iterator[Unit]:
        """Yield the units of all tensors. If consecutive tensors have different ranks, their windows alternate.

        A tensor may fill a whole bucket for its holders. Alternating lets all holders send at the same time.
        """
        run: list[list[Unit]] = []
        holders: set[int] = set()
        for name, tensor in tensors.items():
            if not holders.isdisjoint(tensor.sources.sets):
                yield from _turns(run)
                run, holders = [], set()
            run.append(self._units(name, tensor))
            holders.update(tensor.sources.sets)
        yield from _turns(run)

    def _units(self, name: str, tensor: TensorPieces) -> list[Unit]:
        key = (tensor.item_bytes, tensor.sources.tiling(), tensor.destinations.tiling())
        pattern = self._pattern(name, key)
        if not pattern.windows:
            pattern.windows = list(self._split_into_windows(name, tensor, pattern))
        units = []
        for window in pattern.windows:
            units.append(Unit(name, tensor, window, window.pattern.count))
            window.pattern.count += 1
        return units

    def _split_into_windows(self, name: str, tensor: TensorPieces, pattern: Pattern) -> Iterator[Window]:
        """Cut a tensor into windows that fit a bucket each."""
        if self._worst(pattern) <= self.bucket_bytes:
            sources, destinations = tensor.sources.pieces, tensor.destinations.pieces
            yield Window(None, pattern, range(len(sources)), range(len(destinations)))
            return
        work = [bounding_box([piece.rectangle for piece in tensor.destinations.pieces])]
        while work:
            window = self._clip(name, tensor, rectangle := work.pop())
            if not window.destinations:
                continue
            worst = self._worst(window.pattern)
            if worst <= self.bucket_bytes:
                yield window
            else:
                axis = self._best_axis(name, tensor, rectangle, worst)
                work.extend(reversed(rectangle.slabs(axis, -(-worst // self.bucket_bytes))))

    def _best_axis(self, name: str, tensor: TensorPieces, window: Rectangle, worst: int) -> int:
        """Return the axis along which a cut spreads the load over most ranks."""
        axes = [axis for axis, size in enumerate(window.shape) if size > 1]
        if not axes:
            raise ValueError(
                f"bucket_bytes is {self.bucket_bytes}, but the copies of a single element of {name} take "
                f"{worst} bytes on one rank: make bucket_bytes larger"
            )

        def worst_half(axis: int) -> int:
            return max(self._worst(self._clip(name, tensor, half).pattern) for half in window.slabs(axis, 2))

        return min(axes, key=worst_half)

    def _worst(self, pattern: Pattern) -> int:
        """Return the most bytes that any rank sends or receives for one unit of a pattern."""
        return int(self._load_of_next(pattern, 0).max(initial=0))

    def _clip(self, name: str, tensor: TensorPieces, rectangle: Rectangle) -> Window:
        """Return a window of a tensor."""
        sources, have = tensor.sources.clipped_to(rectangle)
        destinations, need = tensor.destinations.clipped_to(rectangle)
        pattern = self._pattern(name, (tensor.item_bytes, have, need))
        return Window(rectangle.start, pattern, sources, destinations)

    def _pattern(self, name: str, key: _Key) -> Pattern:
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._new_pattern(key, name)
        return pattern

    def _new_pattern(self, key: _Key, name: str) -> Pattern:
        item_bytes, (source_sets, *sources), (destination_sets, *destinations) = key
        geometry = (*sources, *destinations)
        cells = self._geometries.get(geometry)
        if cells is None:
            needs = list(map(Rectangle, *destinations))
            cells = self._geometries[geometry] = cut_into_cells(list(map(Rectangle, *sources)), needs) if needs else []
        groups: dict[tuple[frozenset[int], frozenset[int], int], CellGroup] = {}
        for cell in cells:
            if not cell.holders:
                raise ValueError(f"{name}: no source holds the elements from {cell.start} of shape {cell.shape}")
            have = frozenset(source_sets[number] for number in cell.holders)
            want = frozenset(destination_sets[number] for number in cell.needers)
            nbytes = item_bytes * prod(cell.shape)
            if (have, want) not in self._routes:
                self._routes[have, want] = Route(self.sets.union(have), self.sets.union(want), self.nodes)
            if (have, want, nbytes) not in groups:
                groups[have, want, nbytes] = CellGroup(self._routes[have, want], nbytes, have, want)
            groups[have, want, nbytes].cells.append(cell)
        return Pattern(item_bytes, list(groups.values()), frozenset(source_sets) | frozenset(destination_sets))

    def _no_load(self) -> Load:
        return np.zeros(2 * len(self._profiles), dtype=np.int64)

    def _load_of_next(self, pattern: Pattern, number: int) -> Load:
        """Return the load that one more unit adds to the bounds [sent, received] of every profile, after
        ``number`` units in the bucket.
        """
        while len(pattern.loads) <= number:
            total = self._load(pattern, len(pattern.loads) + 1)
            pattern.loads.append(total - pattern.total if pattern.loads else total)
            pattern.total = total
        return pattern.loads[number]

    def _load(self, pattern: Pattern, count: int) -> Load:
        load = self._no_load()
        sent, received = load[: len(self._profiles)], load[len(self._profiles) :]
        for group in pattern.groups:
            turns = count * len(group.cells)
            holds = self._belongs(group.holder_sets)
            receives = self._belongs(group.needer_sets) & ~holds
            copies = holds * group.route.most_sent(turns) + receives * group.route.most_forwarded(turns)
            sent += group.nbytes * copies
            received += group.nbytes * turns * receives
        return load

    def _belongs(self, sets: frozenset[int]) -> NDArray[np.bool_]:
        """Return whether each profile has a rank in any of the sets: bool [profiles]."""
        if sets not in self._members:
            self._members[sets] = np.logical_or.reduce(self._profiles[:, list(sets)], axis=1)
        return self._members[sets]

    def _set_first_turns(self) -> None:
        """Number the turns. On each route, a cell group starts at the turn after the group before it."""
        ends: dict[int, int] = {}
        for pattern in self._patterns.values():
            for group in pattern.groups:
                group.first_turn = ends.get(id(group.route), 0)
                ends[id(group.route)] = group.first_turn + pattern.count * len(group.cells)


def gather_tensors(
    sources: Sequence[Place], destinations: Sequence[Place], element_sizes: Mapping[str, int], order: Sequence[str]
) -> tuple[dict[str, TensorPieces], RankSets]:
    """Gather the pieces of the tensors in ``order`` that a destination needs, and number the rank sets that hold them."""
    sets = RankSets()
    sources_by_name, needs_by_name = _by_tensor(sources, order, sets), _by_tensor(destinations, order, sets)
    tensors = {
        name: TensorPieces(element_sizes[name], sources_by_name[name], needs_by_name[name])
        for name in order
        if needs_by_name[name].pieces
    }
    return tensors, sets


def _by_tensor(places: Sequence[Place], order: Sequence[str], sets: RankSets) -> dict[str, PlacedPieces]:
    """Collect the pieces of the tensors in ``order``. This loop visits all pieces of all places, so it must be fast."""
    placed = {name: PlacedPieces() for name in order}
    find = placed.get
    for place in places:
        number, buffer = sets.number(place.ranks), place.buffer
        for piece in place.pieces:
            entry = find(piece.hf_name)
            if entry is not None:
                entry.sets.append(number)
                entry.buffers.append(buffer)
                entry.pieces.append(piece)
    return placed


def _turns(run: Sequence[Sequence[Unit]]) -> Iterator[Unit]:
    for turn in zip_longest(*run):
        yield from (unit for unit in turn if unit is not None)
