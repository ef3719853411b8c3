"""From flat ranges of local parameters to rectangles in Hugging Face coordinates. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.bridge.map.strided import Rectangle, contiguous_strides
from rlhf_mcore.types import ModelGeometry, Shard


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a Hugging Face tensor. Its elements lie one after the other from ``offset`` of a flat range on."""

    hf_name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def regions(held: Sequence[Piece], begin: int, end: int) -> list[Region]:
    """What elements ``begin`` to ``end`` of a local tensor with pieces ``held`` are. Padding is nobody's.

    A range that begins and ends anywhere cuts a matrix into up to three rectangles: the rest of a row, whole rows, a part of a row.
    """
    found = []
    for piece in held:
        # Whatever way Megatron cuts a tensor, a piece of it is one block of the local one.
        assert piece.strides == contiguous_strides(piece.shape), piece
        low, high = max(begin, piece.offset), min(end, piece.offset + piece.numel)
        if low >= high:
            continue
        position = low - begin
        for start, shape in boxes(piece.shape, low - piece.offset, high - piece.offset):
            where = tuple(a + b for a, b in zip(piece.start, start, strict=True))
            found.append(Region(piece.hf_name, where, shape, position))
            position += prod(shape)
    return found


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    """Elements ``begin`` to ``end`` of a row-major tensor as rectangles (start, shape), in order."""
    row = prod(shape[1:])
    while begin < end:
        index, within = divmod(begin, row)
        if within == 0 and end - begin >= row:
            count = (end - begin) // row
            yield (index, *(0,) * (len(shape) - 1)), (count, *shape[1:])
            begin += count * row
            continue
        stop = min(end, (index + 1) * row)
        for start, extent in boxes(shape[1:], within, within + stop - begin):
            yield (index, *start), (1, *extent)
        begin = stop


def writes(name: str, geometry: ModelGeometry, shard: Shard) -> bool:
    """Whether a rank writes the state of its part of a parameter: of tensor-parallel replicas the first does.

    A tied embedding has two owners under pipeline parallelism; the first stage writes it.
    """
    held = pieces(name, geometry, shard)
    if name == "output_layer.weight" and any(piece.hf_name == "model.embed_tokens.weight" for piece in held):
        return False
    return shard.rank == 0 or held != pieces(name, geometry, replace(shard, rank=0))
