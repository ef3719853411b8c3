"""Places of the scales of weights of 8 bits: a rank has those of all blocks that it has a part of. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rectangles import contiguous_strides
from rlhf_mcore.families.quantised import Quantisation

SCALES = "::scales"  # behind the name of a local tensor: that of its scales


def are_quantised(pieces: Sequence[Piece], kind: Quantisation) -> bool:
    """Tell whether the tensors in one local tensor have 8 bits: all, or none."""
    found = {kind.applies(piece.hf_name) for piece in pieces}
    assert len(found) < 2, f"8 bits and more in one tensor: {[piece.hf_name for piece in pieces]}"
    return True in found


def scale_tables(pieces: Sequence[Piece], kind: Quantisation) -> tuple[Piece, ...]:
    """Describe the scales of some pieces: one table behind the other, of the blocks that a piece has a part of."""
    tables, offset = list[Piece](), 0
    for piece in pieces:
        start, shape = kind.blocks(piece.start, piece.shape)
        tables.append(Piece(piece.hf_name + kind.suffix, start, shape, offset, contiguous_strides(shape)))
        offset += prod(shape)
    return tuple(tables)


def scale_pieces(pieces: Sequence[Piece], kind: Quantisation) -> tuple[Piece, ...]:
    """Describe the same as pieces that are equal or disjoint on all ranks, as those of weights are.

    Of a block that a piece has only a part of another piece may have the rest: its scale is a piece of its own.
    """
    return tuple(
        [
            part
            for piece, table in zip(pieces, scale_tables(pieces, kind), strict=True)
            for part in _divide(piece, table, kind)
        ]
    )


def _divide(piece: Piece, table: Piece, kind: Quantisation) -> Iterator[Piece]:
    """Cut a table behind the blocks at its borders that ``piece`` has only a part of."""
    runs = []
    for begin, count, size, first, num in zip(
        piece.start, piece.shape, kind.block, table.start, table.shape, strict=True
    ):
        low = first + (begin % size > 0)
        high = first + num - ((begin + count) % size > 0)
        borders = sorted({first, min(low, first + num), max(high, first), first + num})
        runs.append([(a, b) for a, b in pairwise(borders) if a < b])
    for spans in product(*runs):
        start, shape = tuple([a for a, _ in spans]), tuple([b - a for a, b in spans])
        within = sum((a - origin) * stride for a, origin, stride in zip(start, table.start, table.strides, strict=True))
        yield Piece(table.hf_name, start, shape, table.offset + within, table.strides)


def num_scales(pieces: Sequence[Piece], kind: Quantisation) -> int:
    """Count the elements of the tables of some pieces."""
    return sum(prod(table.shape) for table in scale_tables(pieces, kind))


def with_scales(places: Sequence[Place], kind: Quantisation) -> list[Place]:
    """Add the places of scales to those of weights."""
    every = list[Place]()
    for place in places:
        every.append(place)
        if are_quantised(place.pieces, kind):
            pieces, count = scale_pieces(place.pieces, kind), num_scales(place.pieces, kind)
            every.append(replace(place, buffer=place.buffer + SCALES, pieces=pieces, numel=count, padding=()))
    return every
