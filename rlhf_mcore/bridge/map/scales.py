"""Describe places of 8-bit weights' scales.

A rank stores the scales of all blocks that it holds a part of. Pure Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rectangles import contiguous_strides
from rlhf_mcore.families.quantised import Quantisation

SCALES = "::scales"  # suffix: the scales of local tensor X are in local tensor X::scales


def are_quantised(pieces: Sequence[Piece], kind: Quantisation) -> bool:
    """Return whether the pieces of one local tensor are quantised to 8 bits.

    They must be all quantised or all unquantised.
    """
    found = {kind.applies(piece.hf_name) for piece in pieces}
    assert len(found) < 2, f"8 bits and more in one tensor: {[piece.hf_name for piece in pieces]}"
    return True in found


def scale_tables(pieces: Sequence[Piece], kind: Quantisation) -> tuple[Piece, ...]:
    """Describe the scales of some pieces: one table per piece, with all blocks that the piece intersects."""
    tables, offset = list[Piece](), 0
    for piece in pieces:
        start, shape = kind.blocks(piece.start, piece.shape)
        tables.append(Piece(piece.hf_name + kind.suffix, start, shape, offset, contiguous_strides(shape)))
        offset += prod(shape)
    return tuple(tables)


def scale_pieces(pieces: Sequence[Piece], kind: Quantisation) -> tuple[Piece, ...]:
    """Describe the scales of some pieces, in pieces that are equal or disjoint on all ranks, like weight pieces.

    If two pieces share a block, its scale is a separate piece.
    """
    return tuple(
        [
            part
            for piece, table in zip(pieces, scale_tables(pieces, kind), strict=True)
            for part in _divide(piece, table, kind)
        ]
    )


def _divide(piece: Piece, table: Piece, kind: Quantisation) -> Iterator[Piece]:
    """Split a table so that partly covered blocks at its borders are separate."""
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
    """Return the number of scales for some pieces."""
    return sum(prod(table.shape) for table in scale_tables(pieces, kind))


def with_scales(places: Sequence[Place], kind: Quantisation) -> list[Place]:
    """Add the scales' places to the weights' places."""
    every = list[Place]()
    for place in places:
        every.append(place)
        if are_quantised(place.pieces, kind):
            pieces, count = scale_pieces(place.pieces, kind), num_scales(place.pieces, kind)
            every.append(replace(place, buffer=place.buffer + SCALES, pieces=pieces, numel=count, padding=()))
    return every
