"""Cutting a tensor into cells: rectangles within which every source piece and every destination piece is whole or absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from rlhf_mcore.bridge.map.rectangles import Index, Rectangle

_Label = tuple[int, int]  # bit masks of the sources and destinations that cover a cell


@dataclass(frozen=True, slots=True)
class Cell:
    """A rectangle with the numbers of the sources that hold it and of the destinations that need it."""

    start: Index
    shape: Index
    holders: tuple[int, ...]
    needers: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def cut(sources: Sequence[Rectangle], destinations: Sequence[Rectangle]) -> list[Cell]:
    """All cells that a destination needs, in row-major order of their first element. A cell that nobody holds has no holders."""
    breaks = _breaks([*sources, *destinations])
    positions = [{value: index for index, value in enumerate(axis)} for axis in breaks]
    need: dict[Index, int] = {}
    have: dict[Index, int] = {}
    for number, rectangle in enumerate(destinations):
        for index in _covered(rectangle, positions):
            need[index] = need.get(index, 0) | 1 << number
    for number, rectangle in enumerate(sources):
        for index in _covered(rectangle, positions):
            have[index] = have.get(index, 0) | 1 << number
    boxes = _merge({index: (have.get(index, 0), wanted) for index, wanted in need.items()}, len(breaks))
    return [_cell(low, high, label, breaks) for low, high, label in boxes]


def _breaks(rectangles: Sequence[Rectangle]) -> list[list[int]]:
    """Ascending borders of all rectangles, for each axis."""
    axes = len(rectangles[0][0])
    borders: list[set[int]] = [set() for _ in range(axes)]
    for start, shape in rectangles:
        for axis in range(axes):
            borders[axis].update((start[axis], start[axis] + shape[axis]))
    return [sorted(values) for values in borders]


def _covered(rectangle: Rectangle, positions: list[dict[int, int]]) -> product[Index]:
    start, shape = rectangle
    return product(
        *(range(at[begin], at[begin + size]) for at, begin, size in zip(positions, start, shape, strict=True))
    )


def _merge(labels: dict[Index, _Label], axes: int) -> list[tuple[Index, Index, _Label]]:
    """Greedily joins neighbours with the same label, along the last axis first. Boxes are (low, high, label), high exclusive."""
    boxes = [(index, tuple(i + 1 for i in index), label) for index, label in labels.items()]
    for axis in reversed(range(axes)):
        open_boxes: dict[tuple[Index, Index, Index, Index, _Label, int], Index] = {}
        for low, high, label in sorted(boxes):
            sides = (low[:axis], low[axis + 1 :], high[:axis], high[axis + 1 :], label)
            first = open_boxes.pop((*sides, low[axis]), low)
            open_boxes[(*sides, high[axis])] = first
        boxes = [(first, (*key[2], key[5], *key[3]), key[4]) for key, first in open_boxes.items()]
    return sorted(boxes)


def _cell(low: Index, high: Index, label: _Label, breaks: list[list[int]]) -> Cell:
    start = tuple(axis[i] for axis, i in zip(breaks, low, strict=True))
    end = tuple(axis[i] for axis, i in zip(breaks, high, strict=True))
    shape = tuple(b - a for a, b in zip(start, end, strict=True))
    return Cell(start, shape, _bits(label[0]), _bits(label[1]))


def _bits(mask: int) -> tuple[int, ...]:
    return tuple(number for number in range(mask.bit_length()) if mask >> number & 1)
