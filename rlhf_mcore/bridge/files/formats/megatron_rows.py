"""Megatron's tensors of a whole model (as one rank would hold it) and the Hugging Face rows in them, through the rules."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.bridge.map.rules import find_rule, pieces
from rlhf_mcore.types import ModelGeometry, Shard

_WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows from ``row`` on of a Megatron tensor are ``count`` rows of a Hugging Face tensor, from ``hf_row`` on."""

    hf_name: str
    hf_row: int
    row: int
    count: int


def runs(parameter: str, geometry: ModelGeometry) -> tuple[list[Run], tuple[int, ...]]:
    """What the rows of a Megatron parameter hold, in order, and its shape without padding.

    Raises:
        KeyError: the family has no such parameter.
    """
    held = pieces(parameter, geometry, _WHOLE)
    width = held[0].shape[1:]
    found = []
    for piece in held:
        # On one rank nothing is split by columns: every piece is whole rows.
        assert piece.shape[1:] == width and not any(piece.start[1:]), parameter
        found.append(Run(piece.hf_name, piece.start[0], piece.offset // piece.strides[0], piece.shape[0]))
    found.sort(key=lambda run: run.row)
    return found, (sum(run.count for run in found), *width)


def is_padded(parameter: str, geometry: ModelGeometry) -> bool:
    """Whether a file may have more rows of a parameter than the model: those of a vocabulary."""
    return find_rule(geometry, parameter)[0].kind == "vocab_parallel"
