"""Find the matrices of single experts in files that stack a layer's experts, as transformers does in memory.

``experts.gate_up_proj`` is [experts, 2 * ffn, hidden], with gate rows before up rows, and ``experts.down_proj`` is
[experts, hidden, ffn]. The files of Qwen3.5 with experts are expected in this form; no published file has been read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MATRIX = re.compile(r"(.*\.experts\.)(\d{1,6})\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """The rows of one matrix in a tensor with all experts."""

    tensor: str  # name of the stacked tensor
    expert: int
    half: int | None  # 0: gate rows, 1: up rows, None: all rows

    def shape(self, stacked: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the matrix, or () if the stacked tensor does not contain it."""
        if len(stacked) != 3 or self.expert >= stacked[0]:
            return ()
        return (stacked[1] if self.half is None else stacked[1] // 2, stacked[2])

    def rows(self, rows: slice, stacked: tuple[int, ...]) -> slice:
        """Return rows of the matrix as rows of the stacked tensor."""
        count = self.shape(stacked)[0]
        start, stop, _ = rows.indices(count)
        first = count * (self.half or 0)
        return slice(first + start, first + stop)


def part_of_stack(name: str) -> StackedMatrix | None:
    """Return the place of an expert's matrix in a stacked tensor, or None for other names."""
    if (match := _MATRIX.fullmatch(name)) is None:
        return None
    block, expert, kind = match.groups()
    if kind == "down":
        return StackedMatrix(f"{block}down_proj", int(expert), None)
    return StackedMatrix(f"{block}gate_up_proj", int(expert), int(kind == "up"))
