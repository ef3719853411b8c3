"""Rows of a step that one rank owns: sums by row, and how they become known to all ranks.

Everything that ranks must agree on is a number per row, computed by the rank that owns the row, or follows from such numbers. So no
result depends on who owns which row, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """R of the B rows of a step, with their tokens back to back, N in all.

    Args:
        rows: [R] int64, ascending: which rows these are.
        lengths: [B] int64: tokens of every row of the step.
        merge: takes [B, ...] that is zero but for these rows, and returns the sum over all ranks. The default is that of a rank that
            owns everything.
    """

    rows: Tensor
    lengths: Tensor
    merge: Callable[[Tensor], Tensor] = lambda values: values
    token_rows: Tensor = field(init=False, repr=False)  # [N] int64: the row of each token

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_rows", self.rows.repeat_interleave(self.lengths[self.rows]))

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """[B] -> [N]: every token gets the value of its row."""
        return per_row[self.token_rows]

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """[B] float64: sum of ``values`` [N] over the tokens of each row in the bool ``mask`` [N]. On every rank."""
        return self.merge(self.local_sums(values, mask))

    def local_sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """As ``sums``, zero but for the rows of this rank, and without any other rank."""
        zeros = torch.zeros(self.num_rows, dtype=torch.float64)
        return zeros.index_add_(0, self.token_rows[mask], values[mask].double())

    def extremes(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """[B] float64 each: smallest and largest of ``values`` [N] in ``mask`` [N] by row, 0 for a row without. On every rank."""
        found = torch.zeros(self.num_rows, 2, dtype=torch.float64)
        rows, inside = self.token_rows[mask], values[mask].double()
        for column, reduce in enumerate(("amin", "amax")):
            found[:, column].scatter_reduce_(0, rows, inside, reduce, include_self=False)
        smallest, largest = self.merge(found).unbind(1)
        return smallest, largest

    def last(self, mask: Tensor) -> Tensor:
        """[N] bool: the last token in ``mask`` [N] of each row that has one."""
        held = mask.nonzero().flatten()
        rows = self.token_rows[held]
        is_last = torch.ones(len(held), dtype=torch.bool)
        is_last[:-1] = rows[1:] != rows[:-1]
        found = torch.zeros_like(mask)
        found[held[is_last]] = True
        return found
