"""Sums over trainable tokens, also per row, and the only place where a loss is divided by global counts.

Values outside a mask are arbitrary and may be NaN. They are removed by selection, not by multiplication with zero (0 * NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token", "sequence", "constant")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the scalar sum of the ``values`` that the bool ``mask`` of the same shape selects; 0 for an empty mask."""
    return torch.where(mask, values, 0).sum()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the scalar sum of ``weights * values`` (same shapes), skipping positions of weight zero.

    With weights from :func:`row_weights`, this is the microbatch's share of a KL or entropy term of the loss. The gradient with
    respect to ``values`` is zero at positions of weight zero. If ``values`` were computed from invalid inputs there, that computation
    must be masked too (see the ``mask`` of :func:`~rlhf_mcore.algorithms.kl.kl_penalty`).
    """
    return (weights * torch.where(weights != 0, values, 0)).sum()


def row_weights(
    num_sampled: Tensor, aggregation: str, *, num_tokens: int, num_rows: int, constant_length: int | None = None
) -> Tensor:
    """Compute the weight of a row's trainable tokens: loss = sum(weights * per_token_loss) over all microbatches and all ranks.

    The counts refer to the whole minibatch. The gradient therefore does not depend on how its rows are split into microbatches,
    packed, or distributed over ranks. For row i with len_i trainable tokens:

    - ``token``: 1 / num_tokens. Every token has the same weight (DAPO, arXiv 2503.14476, eq. 8).
    - ``sequence``: 1 / (len_i * num_rows). Mean of the rows' means (GRPO, arXiv 2402.03300, eq. 3).
    - ``constant``: 1 / (constant_length * num_rows). No length bias (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        num_sampled: [rows] trainable tokens of some rows of the minibatch.
        aggregation: one of ``AGGREGATIONS``.
        num_tokens: trainable tokens of the minibatch over all ranks.
        num_rows: rows of the minibatch over all ranks, including rows without a trainable token.
        constant_length: number of tokens; used and required only by ``constant``.

    Returns:
        [rows] float32.

    Raises:
        ValueError: unknown aggregation, or ``constant`` without a positive length.
    """
    # The minimum of 1 only prevents 0 / 0 in a minibatch without any trainable token.
    ones = torch.ones(len(num_sampled))
    if aggregation == "token":
        divisor = ones * max(num_tokens, 1)
    elif aggregation == "sequence":
        divisor = num_sampled.clamp(min=1) * ones * max(num_rows, 1)
    elif aggregation == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f"aggregation 'constant' needs a constant_length of at least 1, not {constant_length!r}")
        divisor = ones * (constant_length * max(num_rows, 1))
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")
    return 1.0 / divisor


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """The R of the B rows of a step that a rank owns, with their N tokens back to back, and sums per row that are equal on all ranks.

    All values that ranks must agree on are numbers per row, which the owner of the row computes, or are derived from such numbers. So
    the results do not depend on which rank owns which row, bit for bit.

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
