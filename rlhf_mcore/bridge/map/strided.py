"""From copies between strided views to rectangles: what a weight loader did, said in Hugging Face coordinates.

Pure Python. Strides and offsets count elements; full tensors are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from rlhf_mcore.bridge.map.pieces import Piece

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # start, shape
Interval = tuple[int, int]  # of elements, half-open
_Dim = tuple[int, int, int]  # size, source stride, destination stride
_Copied = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]  # a piece without its name


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of some storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def copied_pieces(hf_name: str, hf_shape: tuple[int, ...], source: View, destination: View) -> list[Piece]:
    """What ``destination.copy_(source)`` puts where, for a source that is any view of a full tensor of ``hf_shape``.

    Slices, transposes, reshapes and broadcasts become as few rectangles as their geometry allows. Pieces are in order of
    destination offset; the shapes of both views must be the same.
    """
    return [Piece(hf_name, *where) for where in _copied(hf_shape, source, destination)]


def covered(piece: Piece, shape: tuple[int, ...]) -> list[Rectangle]:
    """The part of a contiguous local tensor of ``shape`` that a piece fills, in the tensor's own coordinates."""
    local = View(piece.offset, piece.shape, piece.strides)
    return [(start, extent) for start, extent, _, _ in _copied(shape, local, local)]


@cache  # layers are alike, and so are the copies into them
def _copied(hf_shape: tuple[int, ...], source: View, destination: View) -> list[_Copied]:
    assert source.shape == destination.shape, (source, destination)
    if 0 in source.shape:
        return []
    dims = [dim for dim in zip(source.shape, source.strides, destination.strides, strict=True) if dim[0] != 1]
    start = _unravel(source.offset, hf_shape)
    if isinstance(placed := _place(start, dims, hf_shape), dict):  # nearly always
        return [_rectangle(start, placed, destination.offset)]
    work: list[tuple[int, int, list[_Dim]]] = [(source.offset, destination.offset, _joined(dims))]
    found = []
    while work:
        offset, target, todo = work.pop()
        start = _unravel(offset, hf_shape)
        placed = _place(start, todo, hf_shape)
        if isinstance(placed, int):
            work.extend(_cut(offset, target, todo, placed, start, hf_shape))
        else:
            found.append(_rectangle(start, placed, target))
    return sorted(found, key=lambda piece: piece[2])


@cache
def unfilled(shape: tuple[int, ...], filled: tuple[Rectangle, ...]) -> tuple[Interval, ...]:
    """The elements of a contiguous tensor that rectangles of it leave, as ascending runs that do not touch.

    Raises:
        ValueError: two rectangles overlap.
    """
    return intervals(shape, gaps(shape, filled))


def gaps(shape: tuple[int, ...], filled: Iterable[Rectangle]) -> list[Rectangle]:
    """What the rectangles leave of a tensor.

    Raises:
        ValueError: two of them overlap.
    """
    free: list[Rectangle] = [((0,) * len(shape), shape)]
    for rectangle in filled:
        taken, rest = 0, []
        for box in free:
            parts = _subtract(box, rectangle)
            taken += prod(box[1]) - sum(prod(part[1]) for part in parts)
            rest += parts
        if taken != prod(rectangle[1]):
            raise ValueError(f"the rectangle {rectangle} is written twice")
        free = rest
    return free


def intervals(shape: tuple[int, ...], rectangles: Iterable[Rectangle]) -> tuple[Interval, ...]:
    """The elements of rectangles of a contiguous tensor, as ascending runs that do not touch."""
    strides = contiguous_strides(shape)
    runs = sorted(run for rectangle in rectangles for run in _runs(shape, strides, rectangle))
    joined: list[Interval] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _joined(dims: Iterable[_Dim]) -> list[_Dim]:
    """Dimensions in order of descending source stride; neighbours that are one run on both sides become one."""
    result: list[_Dim] = []
    for size, a, b in sorted(dims, key=lambda dim: -dim[1]):
        if result and result[-1][1] == a * size and result[-1][2] == b * size:
            size *= result.pop()[0]
        result.append((size, a, b))
    return result


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size, stride in zip(shape, contiguous_strides(shape), strict=True):
        index.append(offset // stride % size)
    return tuple(index)


def _place(start: tuple[int, ...], dims: list[_Dim], shape: tuple[int, ...]) -> dict[int, tuple[int, int]] | int:
    """Axis -> (extent, destination stride), or the number of the first dimension that is no range along one axis."""
    strides = contiguous_strides(shape)
    placed: dict[int, tuple[int, int]] = {}
    for number, (size, stride, target) in enumerate(dims):
        axis = next((i for i, n in enumerate(shape) if n > 1 and strides[i] == stride), None)
        if axis is None or axis in placed or start[axis] + size > shape[axis]:
            return number
        placed[axis] = (size, target)
    return placed


def _cut(
    offset: int, target: int, dims: list[_Dim], number: int, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int, list[_Dim]]]:
    """One step nearer to rectangles: a dimension that runs over whole rows is split in two, any other is enumerated."""
    size, stride, step = dims[number]
    rest = dims[:number] + dims[number + 1 :]
    strides = contiguous_strides(shape)
    axis = next((i for i, n in enumerate(shape) if n > 1 and strides[i] == stride), None)
    if axis is not None and start[axis] == 0 and size > shape[axis] and size % shape[axis] == 0:
        row = shape[axis]
        yield offset, target, [*rest, (size // row, stride * row, step * row), (row, stride, step)]
        return
    for index in range(size):
        yield offset + index * stride, target + index * step, rest


def _rectangle(start: tuple[int, ...], placed: dict[int, tuple[int, int]], offset: int) -> _Copied:
    """Axes of one element get the stride of a packed layout, so that equal places have equal descriptions."""
    extents, strides = [], []
    packed = 1
    for axis in reversed(range(len(start))):
        size, stride = placed.get(axis, (1, packed))
        extents.append(size)
        strides.append(stride)
        packed = stride * size
    return start, tuple(reversed(extents)), offset, tuple(reversed(strides))


def _subtract(box: Rectangle, hole: Rectangle) -> list[Rectangle]:
    """The box without the hole, as disjoint boxes."""
    low, high = list(box[0]), [a + n for a, n in zip(*box, strict=True)]
    hole_high = [a + n for a, n in zip(*hole, strict=True)]
    if any(h <= a or b <= g for a, b, g, h in zip(low, high, hole[0], hole_high, strict=True)):
        return [box]
    parts: list[Rectangle] = []
    for axis in range(len(low)):
        for begin, end in ((low[axis], hole[0][axis]), (hole_high[axis], high[axis])):
            if begin < end:
                bounds = [*zip(low, high, strict=True)]
                bounds[axis] = (begin, end)
                parts.append((tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)))
        low[axis], high[axis] = max(low[axis], hole[0][axis]), min(high[axis], hole_high[axis])
    return parts


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], rectangle: Rectangle) -> Iterator[Interval]:
    start, extent = rectangle
    whole = len(shape)  # axes from here on are whole
    while whole > 0 and extent[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    length = prod(extent[outer:])
    base = sum(a * s for a, s in zip(start, strides, strict=True))
    for index in product(*(range(n) for n in extent[:outer])):
        first = base + sum(i * s for i, s in zip(index, strides, strict=False))
        yield first, first + length
