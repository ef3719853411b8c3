"""Convert copies between strided views to rectangles, to describe a weight loader in Hugging Face coordinates.

Pure Python. Strides and offsets count elements; full tensors are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from rlhf_mcore.bridge.map.pieces import Interval, Piece, Rectangle, contiguous_strides, gaps, to_intervals

_Dim = tuple[int, int, int]  # size, source stride, destination stride
_Copied = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]  # a piece without its name


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of some storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def copied_pieces(hf_name: str, hf_shape: tuple[int, ...], source: View, destination: View) -> list[Piece]:
    """List the pieces that ``destination.copy_(source)`` writes.

    The source is any view of a full tensor of ``hf_shape``.

    Slices, transposes, reshapes and broadcasts become as few rectangles as their geometry allows. Pieces are
    sorted by destination offset. Both views must have the same shape.
    """
    return [Piece(hf_name, *where) for where in _list_copies(hf_shape, source, destination)]


def covered_rectangles(piece: Piece, shape: tuple[int, ...]) -> list[Rectangle]:
    """List the parts of a contiguous local tensor of ``shape`` that a piece fills, in the local tensor's coordinates."""
    local = View(piece.offset, piece.shape, piece.strides)
    return [Rectangle(start, extent) for start, extent, _, _ in _list_copies(shape, local, local)]


@cache  # layers are alike, so their copies repeat
def _list_copies(hf_shape: tuple[int, ...], source: View, destination: View) -> list[_Copied]:
    assert source.shape == destination.shape, (source, destination)
    if 0 in source.shape:
        return []
    dims = [dim for dim in zip(source.shape, source.strides, destination.strides, strict=True) if dim[0] != 1]
    start = _unravel(source.offset, hf_shape)
    if isinstance(placed := _place(start, dims, hf_shape), dict):  # the usual case
        return [_rectangle(start, placed, destination.offset)]
    work: list[tuple[int, int, list[_Dim]]] = [(source.offset, destination.offset, _join(dims))]
    copies = []
    while work:
        offset, target, todo = work.pop()
        start = _unravel(offset, hf_shape)
        placed = _place(start, todo, hf_shape)
        if isinstance(placed, int):
            work.extend(_split_step(offset, target, todo, placed, start, hf_shape))
        else:
            copies.append(_rectangle(start, placed, target))
    return sorted(copies, key=lambda piece: piece[2])


@cache
def find_padding(shape: tuple[int, ...], filled: tuple[Rectangle, ...]) -> tuple[Interval, ...]:
    """List the elements of a contiguous tensor outside some rectangles, as maximal ascending intervals.

    Raises:
        ValueError: two rectangles overlap.
    """
    return to_intervals(shape, gaps(shape, filled))


def _join(dims: Iterable[_Dim]) -> list[_Dim]:
    """Join dimensions that form one run on both sides, in descending order of source stride."""
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
    """Map each axis to (extent, destination stride).

    Or return the number of the first dimension that is not a range along one axis.
    """
    strides = contiguous_strides(shape)
    placed: dict[int, tuple[int, int]] = {}
    for number, (size, stride, target) in enumerate(dims):
        axis = next((i for i, n in enumerate(shape) if n > 1 and strides[i] == stride), None)
        if axis is None or axis in placed or start[axis] + size > shape[axis]:
            return number
        placed[axis] = (size, target)
    return placed


def _split_step(
    offset: int, target: int, dims: list[_Dim], number: int, start: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, int, list[_Dim]]]:
    """Make one step towards rectangles: split a dimension that spans whole rows in two, enumerate any other."""
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
    """Describe a rectangle.

    Axes of size 1 get the stride of a packed layout, so that equal places have equal descriptions.
    """
    extents, strides = [], []
    packed = 1
    for axis in reversed(range(len(start))):
        size, stride = placed.get(axis, (1, packed))
        extents.append(size)
        strides.append(stride)
        packed = stride * size
    return start, tuple(reversed(extents)), offset, tuple(reversed(strides))
