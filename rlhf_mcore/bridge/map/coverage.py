"""Exchange descriptions of tensors between all ranks of a group, and check them before a sync.

Equal descriptions are sent once. Sources must hold every element, and destinations must fill each of their elements once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rlhf_mcore.bridge.map.pieces import Cell, Interval, Piece, Place, Rectangle, cut_into_cells, whole
from rlhf_mcore.bridge.map.trace import EngineMap
from rlhf_mcore.geometry import LocalParameter
from rlhf_mcore.parallel.collectives import all_gather_unique_json

Intervals = tuple[Interval, ...]
_View = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, shape, strides
Pieces = Callable[[LocalParameter], Sequence[Piece]]


def describe_sources(parameters: Sequence[LocalParameter], pieces_of: Pieces, group: dist.ProcessGroup) -> list[Place]:
    """Describe the places of the trained tensors of all ranks.

    This is a collective call over the group. A rank without a model passes an empty sequence.
    """
    return _places_of_all([Place(p.name, tuple(pieces_of(p)), (), p.tensor.numel()) for p in parameters], group)


def describe_destinations(engine: EngineMap, group: dist.ProcessGroup) -> list[Place]:
    """Describe the places of the engine tensors of all ranks. This is a collective call over the group."""
    return _places_of_all([Place(p.name, p.pieces, (), prod(p.shape), p.padding) for p in engine.parameters], group)


def wire_dtypes(
    parameters: Sequence[LocalParameter], pieces_of: Pieces, group: dist.ProcessGroup
) -> dict[str, torch.dtype]:
    """Agree on the dtype in which each Hugging Face tensor is sent: the source's dtype.

    This is a collective call over the group.
    """
    mine: Mapping[str, str] = {
        piece.hf_name: str(p.tensor.dtype).removeprefix("torch.") for p in parameters for piece in pieces_of(p)
    }
    merged: dict[str, str] = {}
    for described, _ in all_gather_unique_json(mine, group):
        for name, dtype in described.items():
            if merged.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} has dtype {merged[name]} on one rank and {dtype} on another")
    return {name: getattr(torch, dtype) for name, dtype in merged.items()}


def _places_of_all(mine: Sequence[Place], group: dist.ProcessGroup) -> list[Place]:
    """Gather the places of all ranks, and the ranks that store each place."""
    described = [
        [
            place.buffer,
            place.numel,
            place.padding,
            [(piece.hf_name, piece.start, piece.shape, piece.offset, piece.strides) for piece in place.pieces],
        ]
        for place in mine
    ]
    return [
        Place(
            buffer,
            tuple(
                Piece(name, tuple(start), tuple(shape), offset, tuple(strides))
                for name, start, shape, offset, strides in pieces
            ),
            tuple(ranks),
            numel,
            tuple((begin, end) for begin, end in padding),
        )
        for places, ranks in all_gather_unique_json(described, group)
        for buffer, numel, padding, pieces in places
    ]


class CoverageError(ValueError):
    """A description misses elements, or fills elements twice."""


def check_coverage(
    sources: Sequence[Place], destinations: Sequence[Place], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check descriptions against the true shapes of the Hugging Face tensors.

    Every element of every tensor must be in some source. No piece may reach outside its tensor. The pieces of a
    destination must be disjoint in its local tensor. If ``numel`` is given, they must fill the whole local tensor
    except exactly its declared padding.

    Raises:
        CoverageError: with the tensor or buffer and the first wrong elements.
    """
    # Cache of (start, shape, tensor shape) for pieces known to be inside their tensor. Many pieces are alike.
    inside: set[tuple[tuple[int, ...], ...]] = set()
    for place in (*sources, *destinations):
        for piece in place.pieces:
            _check_inside(place, piece, shapes, inside)
    _check_sources(sources, shapes)
    filled: dict[tuple[_View, ...], Intervals] = {}
    for place in destinations:
        key = tuple((piece.offset, piece.shape, piece.strides) for piece in place.pieces)
        if key not in filled:
            filled[key] = _fill(key, place.buffer)
        _check_filled(place, filled[key])


def padding_of(place: Place) -> Intervals:
    """List the elements of a local tensor of known size that no piece fills, as half-open intervals."""
    views = tuple((piece.offset, piece.shape, piece.strides) for piece in place.pieces)
    return _complement(_fill(views, place.buffer), place.numel)


def _check_inside(
    place: Place, piece: Piece, shapes: Mapping[str, tuple[int, ...]], inside: set[tuple[tuple[int, ...], ...]]
) -> None:
    shape = shapes.get(piece.hf_name)
    if shape is None:
        raise CoverageError(f"{place.buffer}: {piece.hf_name} is not a tensor of this model")
    if (key := (piece.start, piece.shape, shape)) in inside:
        return
    if not whole(shape).contains(piece.rectangle):
        raise CoverageError(
            f"{place.buffer}: start {piece.start}, shape {piece.shape} reach outside {piece.hf_name} of shape {shape}"
        )
    inside.add(key)


def _check_sources(sources: Sequence[Place], shapes: Mapping[str, tuple[int, ...]]) -> None:
    rectangles: dict[str, list[Rectangle]] = defaultdict(list)
    for place in sources:
        for piece in place.pieces:
            rectangles[piece.hf_name].append(piece.rectangle)
    gaps: dict[object, Cell | None] = {}
    for name, shape in shapes.items():
        key = (shape, tuple(dict.fromkeys(rectangles[name])))
        if key not in gaps:
            cells = cut_into_cells(key[1], [whole(shape)])
            gaps[key] = next((cell for cell in cells if not cell.holders), None)
        if (gap := gaps[key]) is not None:
            raise CoverageError(f"{name}: no source holds the elements from {gap.start} of shape {gap.shape}")


def _check_filled(place: Place, filled: Intervals) -> None:
    if place.numel == 0:
        return
    if filled and filled[-1][1] > place.numel:
        raise CoverageError(f"{place.buffer}: a piece ends at element {filled[-1][1]} of {place.numel}")
    empty = _complement(filled, place.numel)
    if empty != place.padding:
        raise CoverageError(
            f"{place.buffer}: no piece fills elements {list(empty)[:4]}, but the declared padding is {list(place.padding)[:4]}"
        )


def _fill(views: Sequence[_View], buffer: str) -> Intervals:
    """List the elements that views fill, as maximal half-open intervals.

    Raises:
        CoverageError: two views share an element.
    """
    runs = [_runs(view) for view in views if 0 not in view[1]]
    if not runs:
        return ()
    starts = np.concatenate([start for start, _ in runs])
    lengths = np.concatenate([np.full(len(start), length) for start, length in runs])
    by_start = np.argsort(starts, kind="stable")
    starts, ends = starts[by_start], starts[by_start] + lengths[by_start]
    if starts[0] < 0:
        raise CoverageError(f"{buffer}: a piece begins at element {starts[0]}")
    twice = np.flatnonzero(starts[1:] < ends[:-1])
    if len(twice):
        raise CoverageError(f"{buffer}: element {starts[1:][twice[0]]} is filled twice")
    joints = np.flatnonzero(starts[1:] > ends[:-1])
    lows = starts[np.concatenate(([0], joints + 1))].tolist()
    highs = ends[np.concatenate((joints, [len(ends) - 1]))].tolist()
    return tuple(zip(lows, highs, strict=True))


def _runs(view: _View) -> tuple[NDArray[np.int64], int]:
    """Return the first element of each contiguous run of a view, and the common length of the runs."""
    offset, shape, strides = view
    fastest_first = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    length = 1
    while fastest_first and fastest_first[0][0] == length:
        length *= fastest_first.pop(0)[1]
    starts = np.array([offset], dtype=np.int64)
    for stride, size in reversed(fastest_first):
        starts = (starts[:, None] + np.arange(size) * stride).ravel()
    return starts, length


def _complement(filled: Intervals, numel: int) -> Intervals:
    borders = [0, *(border for interval in filled for border in interval), numel]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return tuple((low, high) for low, high in pairs if low < high)
