"""Name the tensors that a sync sends, and describe the places of 8-bit weights and their scales.

A rank stores the scales of all blocks that it holds a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

import torch

from rlhf_mcore.bridge.map.pieces import Piece, Place, contiguous_strides
from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes, pieces
from rlhf_mcore.families.quantised import Quantisation
from rlhf_mcore.families.quantised import quantisation as quantisation_of
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry

SCALES = "::scales"  # suffix: the scales of local tensor X are in local tensor X::scales


@dataclass(frozen=True, slots=True)
class SentNames:
    """Names and pieces of the sent tensors: the model's tensors, and with ``adapter`` its adapters' tensors."""

    geometry: ModelGeometry
    adapter: AdapterSizes | None = None

    @property
    def _geometries(self) -> list[ModelGeometry]:
        return (
            [self.geometry] if self.adapter is None else [self.geometry, replace(self.geometry, adapter=self.adapter)]
        )

    def shapes(self) -> Shapes:
        return {name: shape for geometry in self._geometries for name, shape in hf_shapes(geometry).items()}

    def pieces(self, parameter: LocalParameter) -> Sequence[Piece]:
        geometry = self._geometries[-1 if ".lora_" in parameter.name else 0]
        return pieces(parameter.name, geometry, parameter.shard)


class QuantisedNames:
    """Names and pieces of the sent tensors after quantisation: 8-bit weights and their scales."""

    def __init__(self, names: SentNames, quantisation: str) -> None:
        self.kind = quantisation_of(quantisation)
        self._names, self._shapes = names, names.shapes()

    def shapes(self) -> Shapes:
        return self.kind.with_scales(self._shapes)

    def pieces(self, parameter: LocalParameter) -> Sequence[Piece]:
        if parameter.name.endswith(SCALES):
            weight = replace(parameter, name=parameter.name.removesuffix(SCALES))
            return scale_pieces(self._names.pieces(weight), self.kind)
        return self._names.pieces(parameter)

    def describe_sent(self, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
        """Describe the sent tensors of a rank. Quantised weights and their scales are meta tensors."""
        sent = []
        for parameter in parameters:
            pieces = self.pieces(parameter)
            if not are_quantised(pieces, self.kind):
                sent.append(parameter)
                continue
            weight = torch.empty(parameter.tensor.shape, dtype=getattr(torch, self.kind.dtype), device="meta")
            scales = torch.empty(num_scales(pieces, self.kind), dtype=torch.float32, device="meta")
            sent.append(replace(parameter, tensor=weight))
            sent.append(replace(parameter, name=parameter.name + SCALES, tensor=scales))
        return sent

    def find_split_tensors(self, sources: Sequence[Place]) -> list[str]:
        """Name the tensors with blocks that no single rank holds whole, in network order."""
        # Pieces cover each tensor: if one piece ends within a block, another piece begins within it.
        starts = {(piece.hf_name, piece.start) for place in sources for piece in place.pieces}
        begun = {name for name, start in starts if self.kind.applies(name) and self._is_within(start)}
        return [name for name in self._shapes if name in begun]

    def _is_within(self, start: tuple[int, ...]) -> bool:
        """Return whether a rectangle of a tensor begins within a block."""
        return any(begin % size for begin, size in zip(start, self.kind.block, strict=True))


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
