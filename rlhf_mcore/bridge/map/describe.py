"""Exchange tensor descriptions between all ranks of a group, as inputs of a plan. Equal descriptions are sent once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.trace import EngineMap
from rlhf_mcore.geometry import LocalParameter
from rlhf_mcore.parallel.collectives import all_gather_unique_json

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
