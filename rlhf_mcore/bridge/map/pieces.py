"""Describe the parts of Hugging Face tensors that ranks store, and compute with the rectangles that these parts are.

Ranks with the same tensor, pipeline and expert coordinates hold the same pieces at the same local views, for any
data-parallel coordinate. They share one description, with their ranks as an arithmetic progression. So the
description of 16,384 ranks is no longer than the description of one replica.

A rectangle has a start and a size along every axis. It can be intersected, subtracted and cut into cells. All this is
pure Python, except :func:`view` of a real tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Index = tuple[int, ...]
Interval = tuple[int, int]  # elements in flat order, half-open
_Label = tuple[int, int]  # bit masks: the sources and the destinations that cover a cell


@dataclass(frozen=True, slots=True)
class Piece:
    """``hf_name[start : start + shape]`` is in a local tensor at ``offset`` with ``strides`` (both in elements)."""

    hf_name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.start, self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the rectangle as an index into the full Hugging Face tensor."""
        return self.rectangle.slices()


@dataclass(frozen=True, slots=True)
class Place:
    """A local tensor that each of ``ranks`` stores. ``ranks`` are ascending (a range for regular layouts).

    ``numel`` is the size of the local tensor, or 0 if it is unknown. ``padding`` lists half-open intervals of
    elements that no Hugging Face tensor fills. Only :func:`rlhf_mcore.bridge.map.coverage.check_coverage` uses
    both.
    """

    buffer: str
    pieces: tuple[Piece, ...]
    ranks: Sequence[int]
    numel: int = 0
    padding: tuple[tuple[int, int], ...] = ()


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """View the part of a contiguous local tensor that a piece describes.

    The view is writable and has shape ``piece.shape``.
    """
    assert tensor.is_contiguous(), piece.hf_name
    return tensor.as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)


class Rectangle(NamedTuple):
    """``tensor[start : start + shape]``."""

    start: Index
    shape: Index

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> Index:
        """Return the exclusive end along every axis."""
        return tuple([begin + size for begin, size in zip(self.start, self.shape, strict=True)])

    def slices(self, origin: Index | None = None) -> tuple[slice, ...]:
        """Return the rectangle as an index into a tensor whose first element is at ``origin``, by default at zero."""
        low = self.start if origin is None else self.relative_to(origin).start
        return tuple([slice(begin, begin + size) for begin, size in zip(low, self.shape, strict=True)])

    def relative_to(self, origin: Index) -> Rectangle:
        """Return the same rectangle in the coordinates of a tensor whose first element is at ``origin``."""
        return Rectangle(tuple([begin - first for begin, first in zip(self.start, origin, strict=True)]), self.shape)

    def contains(self, other: Rectangle) -> bool:
        """Return whether another rectangle has the same number of axes and lies inside this one."""
        if len({len(self.start), len(other.start), len(other.shape)}) > 1:
            return False
        axes = zip(*self, *other, strict=True)
        return all(low <= begin and size >= 0 and begin + size <= low + full for low, full, begin, size in axes)

    def intersection(self, other: Rectangle) -> Rectangle | None:
        """Return the common elements, or None if there are none."""
        start, shape = [], []
        for low, size, begin, length in zip(*self, *other, strict=True):
            first = low if low > begin else begin  # min and max are slower; planning calls this 10,000s of times
            extent = (low + size if low + size < begin + length else begin + length) - first
            if extent <= 0:
                return None
            start.append(first)
            shape.append(extent)
        return Rectangle(tuple(start), tuple(shape))

    def clipped_to(self, window: Rectangle) -> Rectangle | None:
        """Return the part inside a window, relative to the window's start, or None if they do not intersect."""
        inside = self.intersection(window)
        return None if inside is None else inside.relative_to(window.start)

    def without(self, hole: Rectangle) -> list[Rectangle]:
        """Return the elements that are not in ``hole``, as disjoint rectangles."""
        inside = self.intersection(hole)
        if inside is None:
            return [self]
        low, high = list(self.start), list(self.end)
        parts = []
        for axis, (begin, end) in enumerate(zip(inside.start, inside.end, strict=True)):
            for first, last in ((low[axis], begin), (end, high[axis])):
                if first < last:
                    start, stop = (*low[:axis], first, *low[axis + 1 :]), (*high[:axis], last, *high[axis + 1 :])
                    parts.append(Rectangle(start, tuple([b - a for a, b in zip(start, stop, strict=True)])))
            low[axis], high[axis] = begin, end
        return parts

    def slabs(self, axis: int, count: int) -> list[Rectangle]:
        """Cut along an axis into ``count`` nearly equal parts, at most one per element."""
        start, shape = self
        count = min(count, shape[axis])
        borders = [shape[axis] * part // count for part in range(count + 1)]
        return [
            Rectangle(
                (*start[:axis], start[axis] + low, *start[axis + 1 :]),
                (*shape[:axis], high - low, *shape[axis + 1 :]),
            )
            for low, high in pairwise(borders)
        ]


def whole(shape: Index) -> Rectangle:
    """Return the rectangle of a whole tensor."""
    return Rectangle((0,) * len(shape), shape)


def bounding_box(rectangles: Sequence[Rectangle]) -> Rectangle:
    """Return the smallest rectangle that contains all given rectangles."""
    bounds = [(min(starts), max(ends)) for starts, ends in _bounds(rectangles)]
    return Rectangle(tuple([low for low, _ in bounds]), tuple([high - low for low, high in bounds]))


def gaps(shape: Index, filled: Iterable[Rectangle]) -> list[Rectangle]:
    """List the parts of a tensor of ``shape`` that no rectangle covers.

    Raises:
        ValueError: two rectangles overlap.
    """
    free = [whole(shape)]
    for rectangle in filled:
        rest = [part for box in free for part in box.without(rectangle)]
        if sum(box.numel for box in free) - sum(part.numel for part in rest) != rectangle.numel:
            raise ValueError(f"start {rectangle.start}, shape {rectangle.shape} is written twice")
        free = rest
    return free


@cache
def contiguous_strides(shape: Index) -> Index:
    """Compute the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def of_interval(shape: Index, begin: int, end: int) -> Iterator[Rectangle]:
    """Cut elements ``begin`` to ``end`` of a row-major tensor into rectangles, in order.

    An interval of a matrix gives up to three rectangles: the rest of a row, whole rows, and a part of a row.
    """
    row = prod(shape[1:])
    while begin < end:
        index, within = divmod(begin, row)
        if within == 0 and end - begin >= row:
            count = (end - begin) // row
            yield Rectangle((index, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
            begin += count * row
            continue
        stop = min(end, (index + 1) * row)
        for start, extent in of_interval(shape[1:], within, within + stop - begin):
            yield Rectangle((index, *start), (1, *extent))
        begin = stop


def to_intervals(shape: Index, rectangles: Iterable[Rectangle]) -> tuple[Interval, ...]:
    """Convert rectangles of a contiguous tensor to maximal, ascending intervals of elements."""
    strides = contiguous_strides(shape)
    joined: list[Interval] = []
    for begin, end in sorted(run for rectangle in rectangles for run in _runs(shape, strides, rectangle)):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _runs(shape: Index, strides: Index, rectangle: Rectangle) -> Iterator[Interval]:
    """Yield the contiguous runs of a rectangle in a contiguous tensor."""
    start, extent = rectangle
    whole_from = len(shape)  # the rectangle is whole along this axis and all later axes
    while whole_from > 0 and extent[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    outer = max(whole_from - 1, 0)
    length = prod(extent[outer:])
    base = sum(a * s for a, s in zip(start, strides, strict=True))
    for index in product(*(range(n) for n in extent[:outer])):
        first = base + sum(i * s for i, s in zip(index, strides, strict=False))
        yield first, first + length


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle with the numbers of its sources and destinations."""

    start: Index
    shape: Index
    holders: tuple[int, ...]
    needers: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def cut_into_cells(sources: Sequence[Rectangle], destinations: Sequence[Rectangle]) -> list[Cell]:
    """Cut the elements that destinations need into cells, in row-major order of their first element.

    Every source and destination either contains a cell completely or does not touch it. A cell without any source
    has empty ``holders``.
    """
    every = [*sources, *destinations]
    # The borders of all rectangles along each axis, ascending. They form the finest grid that may be needed.
    borders = [sorted({*lows, *highs}) for lows, highs in _bounds(every)]
    positions = [{value: index for index, value in enumerate(axis)} for axis in borders]

    def grid(rectangle: Rectangle) -> product[Index]:
        spans = zip(positions, rectangle.start, rectangle.end, strict=True)
        return product(*(range(at[begin], at[end]) for at, begin, end in spans))

    need: dict[Index, int] = {}
    have: dict[Index, int] = {}
    for masks, rectangles in ((need, destinations), (have, sources)):
        for number, rectangle in enumerate(rectangles):
            for index in grid(rectangle):
                masks[index] = masks.get(index, 0) | 1 << number
    cells = []
    for low, high, label in _merge({index: (have.get(index, 0), mask) for index, mask in need.items()}, len(borders)):
        start = tuple([axis[i] for axis, i in zip(borders, low, strict=True)])
        end = tuple([axis[i] for axis, i in zip(borders, high, strict=True)])
        shape = tuple([b - a for a, b in zip(start, end, strict=True)])
        holders, needers = (tuple([n for n in range(mask.bit_length()) if mask >> n & 1]) for mask in label)
        cells.append(Cell(start, shape, holders, needers))
    return cells


def _bounds(rectangles: Sequence[Rectangle]) -> list[tuple[Index, Index]]:
    """Return, for each axis, the starts and the ends of all rectangles."""
    starts, ends = zip(*(r.start for r in rectangles), strict=True), zip(*(r.end for r in rectangles), strict=True)
    return list(zip(starts, ends, strict=True))


def _merge(labels: dict[Index, _Label], axes: int) -> list[tuple[Index, Index, _Label]]:
    """Join neighbours with the same label greedily, along the last axis first.

    A box is (low, high, label) with exclusive high.
    """
    boxes = [(index, tuple(i + 1 for i in index), label) for index, label in labels.items()]
    for axis in reversed(range(axes)):
        open_boxes: dict[tuple[Index, Index, Index, Index, _Label, int], Index] = {}
        for low, high, label in sorted(boxes):
            sides = (low[:axis], low[axis + 1 :], high[:axis], high[axis + 1 :], label)
            first = open_boxes.pop((*sides, low[axis]), low)
            open_boxes[(*sides, high[axis])] = first
        boxes = [(first, (*key[2], key[5], *key[3]), key[4]) for key, first in open_boxes.items()]
    return sorted(boxes)
