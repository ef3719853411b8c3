"""The rows of a step that a rank owns, and sums per row that are equal on all ranks.

All values that ranks must agree on are numbers per row, which the owner of the row computes, or are derived from such numbers. So the
results do not depend on which rank owns which row, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """R of the B rows of a step, with their N tokens back to back.

    Args:
        rows: [R] int64, ascending: the rows that this rank owns.
        lengths: [B] int64: tokens of every row of the step.
        merge: takes a tensor [B, ...] that is zero except for these rows, and returns the sum over all ranks. The default is for a
            rank that owns all rows.
    """

    rows: Tensor
    lengths: Tensor
    merge: Callable[[Tensor], Tensor] = lambda values: values
    token_rows: Tensor = field(init=False, repr=False)  # [N] int64: the row of each token

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_rows", self.rows.repeat_interleave(self.lengths[self.rows]))

    @property
    def num_rows(self) -> int:
        """Return B, the number of rows of the step."""
        return len(self.lengths)

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """Copy the value of each row to its tokens: [B] -> [N]."""
        return per_row[self.token_rows]

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """Sum ``values`` [N] over the tokens of each row in the bool ``mask`` [N]. Returns [B] float64, on every rank."""
        return self.merge(self.local_sums(values, mask))

    def local_sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """Compute ``sums`` only for the rows that this rank owns; other rows are zero. Local."""
        zeros = torch.zeros(self.num_rows, dtype=torch.float64)
        return zeros.index_add_(0, self.token_rows[mask], values[mask].double())

    def extremes(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the minimum and maximum of ``values`` [N] in ``mask`` [N] for each row: [B] float64 each, on every rank.

        Rows without a token in the mask have 0.
        """
        extremes = torch.zeros(self.num_rows, 2, dtype=torch.float64)
        rows, inside = self.token_rows[mask], values[mask].double()
        for column, reduce in enumerate(("amin", "amax")):
            extremes[:, column].scatter_reduce_(0, rows, inside, reduce, include_self=False)
        smallest, largest = self.merge(extremes).unbind(1)
        return smallest, largest

    def last(self, mask: Tensor) -> Tensor:
        """Mark the last token in ``mask`` [N] of each row, if any. Returns [N] bool."""
        places = mask.nonzero().flatten()
        rows = self.token_rows[places]
        is_last = torch.ones(len(places), dtype=torch.bool)
        is_last[:-1] = rows[1:] != rows[:-1]
        last = torch.zeros_like(mask)
        last[places[is_last]] = True
        return last
