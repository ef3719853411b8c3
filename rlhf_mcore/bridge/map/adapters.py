"""Match rows of a rank's weight with the rows of B and of A whose product they get. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.families.adapters import A, B, hf_module
from rlhf_mcore.geometry import ModelGeometry, Shard


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``row`` to ``row + count`` of a rank's weight get the product of rows of its B and of its A.

    They are ``b_row`` to ``b_row + count`` of B, and ``a_row`` to ``a_row + rank`` of A.
    """

    row: int
    count: int
    b_row: int
    a_row: int


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the Megatron parameters A and B of a weight's adapters."""
    head, _, number = weight.rpartition(".weight")
    return f"{head}{A}{number}", f"{head}{B}{number}"


def blocks(weight: str, geometry: ModelGeometry, shard: Shard) -> list[Block]:
    """List the blocks of a rank's weight that have adapters, by their rows; none where it has none.

    Args:
        weight: Megatron's name.
        geometry: of the adapters.
        shard: the rank's.
    """
    adapter = geometry.adapter
    assert adapter is not None
    name_a, name_b = adapter_names(weight)
    try:
        held_a, held_b = pieces(name_a, geometry, shard), pieces(name_b, geometry, shard)
    except KeyError:
        return []
    first_rows = {hf_module(piece.hf_name): piece.offset // piece.strides[0] for piece in held_a}
    # By the first row that a piece has of the whole B: of the embedding, whose B PEFT has transposed, it is a column.
    b_rows = {(hf_module(piece.hf_name), max(piece.start)): piece.offset // adapter.rank for piece in held_b}
    joined = []
    for piece in pieces(weight, replace(geometry, adapter=None), shard):
        module = piece.hf_name.removesuffix(".weight")
        if module in first_rows:
            b_row = b_rows[module, piece.start[0]]
            joined.append(Block(piece.offset // piece.strides[0], piece.shape[0], b_row, first_rows[module]))
    return sorted(joined, key=lambda block: block.row)
