"""What every rank of a group holds, made known to all of them: the inputs of a plan. Equal descriptions travel once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.trace import EngineMap
from rlhf_mcore.parallel.collectives import all_gather_unique_json
from rlhf_mcore.types import LocalParameter

Pieces = Callable[[LocalParameter], Sequence[Piece]]


def describe_sources(parameters: Sequence[LocalParameter], pieces_of: Pieces, group: dist.ProcessGroup) -> list[Place]:
    """Places of the trained tensors of all ranks. Collective over the group; a rank without a model passes none."""
    mine = [[p.name, p.tensor.numel(), [_encode(piece) for piece in pieces_of(p)]] for p in parameters]
    return [
        Place(name, tuple(map(_decode, pieces)), tuple(ranks), numel)
        for described, ranks in all_gather_unique_json(mine, group)
        for name, numel, pieces in described
    ]


def describe_destinations(engine: EngineMap, group: dist.ProcessGroup) -> list[Place]:
    """Places of the engine tensors of all ranks. Collective over the group."""
    mine = [
        [p.name, torch.Size(p.shape).numel(), [_encode(piece) for piece in p.pieces], [list(gap) for gap in p.padding]]
        for p in engine.parameters
    ]
    return [
        Place(name, tuple(map(_decode, pieces)), tuple(ranks), numel, tuple((begin, end) for begin, end in padding))
        for described, ranks in all_gather_unique_json(mine, group)
        for name, numel, pieces, padding in described
    ]


def wire_dtypes(
    parameters: Sequence[LocalParameter], pieces_of: Pieces, group: dist.ProcessGroup
) -> dict[str, torch.dtype]:
    """The dtype in which each Hugging Face tensor travels: the source's. Collective over the group."""
    mine: Mapping[str, str] = {
        piece.hf_name: str(p.tensor.dtype).removeprefix("torch.") for p in parameters for piece in pieces_of(p)
    }
    merged: dict[str, str] = {}
    for described, _ in all_gather_unique_json(mine, group):
        for name, dtype in described.items():
            if merged.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} is held as {merged[name]} on one rank and as {dtype} on another")
    return {name: getattr(torch, dtype) for name, dtype in merged.items()}


def _encode(piece: Piece) -> list[Any]:
    return [piece.hf_name, list(piece.start), list(piece.shape), piece.offset, list(piece.strides)]


def _decode(data: list[Any]) -> Piece:
    name, start, shape, offset, strides = data
    return Piece(name, tuple(start), tuple(shape), offset, tuple(strides))
