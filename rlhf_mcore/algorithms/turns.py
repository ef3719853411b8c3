"""The policy's turns in the rows of a step: runs of trainable tokens without an environment's tokens in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.rows import OwnedRows


@dataclass(frozen=True, slots=True)
class OwnedTurns:
    """The M turns of the rows that this rank owns, in their order, and their H trainable tokens."""

    tokens: Tensor  # [H] int64: places of these tokens among all tokens of this rank
    of_token: Tensor  # [H] int64: the turn of each
    first: Tensor  # [M] int64: the first of the H tokens in each turn
    last: Tensor  # [M] int64: the last of the H tokens in each turn
    rows: Tensor  # [M] int64: the row of each turn
    places: Tensor  # [M] int64: which turn of its row, from 0
    has_next: Tensor  # [M] bool: another turn of its row follows

    @classmethod
    def of(cls, loss_mask: Tensor, rows: OwnedRows) -> OwnedTurns:
        """Find the turns in the bool ``loss_mask`` [N] of the rows that this rank owns."""
        tokens = loss_mask.nonzero().flatten()
        token_rows = rows.token_rows[tokens]
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[1:] = (tokens[1:] != tokens[:-1] + 1) | (token_rows[1:] != token_rows[:-1])
        first = begins.nonzero().flatten()
        last = torch.cat([first[1:], first.new_tensor([len(tokens)])])[: len(first)] - 1
        turn_rows = token_rows[first]
        is_first = torch.ones_like(turn_rows, dtype=torch.bool)
        is_first[1:] = turn_rows[1:] != turn_rows[:-1]
        places = torch.arange(len(first)) - is_first.nonzero().flatten()[is_first.cumsum(0) - 1]
        has_next = torch.zeros_like(is_first)
        has_next[:-1] = ~is_first[1:]
        return cls(tokens, begins.cumsum(0) - 1, first, last, turn_rows, places, has_next)

    def sums(self, values: Tensor) -> Tensor:
        """Sum ``values`` [N] over the tokens of each turn. Returns [M] float64."""
        zeros = torch.zeros(len(self.rows), dtype=torch.float64)
        return zeros.index_add_(0, self.of_token, values[self.tokens].double())


def turn_returns(rewards: Tensor, turns: OwnedTurns, rows: OwnedRows, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute G_j = R_j + gamma G_{j+1}, where R_j is the sum of the rewards [N] of the tokens of turn j. On every rank.

    Returns:
        [B, J] float64 returns, J the largest number of turns of a row, and [B, J] bool: the turns that exist. A row without turns
        counts as one with one turn.
    """
    counts = rows.merge(turns.rows.bincount(minlength=rows.num_rows)).clamp(min=1)
    width = int(counts.max()) if len(counts) else 1
    returns = torch.zeros(rows.num_rows, width, dtype=torch.float64)
    returns[turns.rows, turns.places] = turns.sums(rewards)
    returns = rows.merge(returns)
    for place in reversed(range(width - 1)):
        returns[:, place] += gamma * returns[:, place + 1]
    return returns, torch.arange(width) < counts[:, None]
