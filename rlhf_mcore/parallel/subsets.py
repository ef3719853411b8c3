"""The support of each token: the tokens that top-k and top-p allowed when it was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.types import Ragged

if TYPE_CHECKING:
    from rlhf_mcore.parallel.logprobs import _Columns


@dataclass(frozen=True, slots=True)
class Subsets:
    """The supports of tokens as one list of pairs (token index, id in its support), sorted by token."""

    tokens: Tensor  # [M] int64
    ids: Tensor  # [M] int64
    ends: list[int]  # [N + 1]: zero, then the end of each token's pairs
    is_cut: Tensor  # [N] bool: tokens with a support; the others were sampled from the whole vocabulary

    @classmethod
    def of(cls, support: Ragged[Tensor]) -> Subsets:
        """Build the pairs of a ragged field on the host."""
        counts = support.counts.long()
        tokens = torch.arange(len(counts)).repeat_interleave(counts)
        return cls(tokens, support.values.long(), [0, *accumulate(counts.tolist())], counts > 0)

    def on(self, device: torch.device) -> Subsets:
        return Subsets(self.tokens.to(device), self.ids.to(device), self.ends, self.is_cut.to(device))

    def of_tokens(self, a: int, b: int) -> Subsets:
        first, last = self.ends[a], self.ends[b]
        return Subsets(self.tokens[first:last] - a, self.ids[first:last], self.ends[a : b + 1], self.is_cut[a:b])

    def log_sum(self, z: Tensor, columns: _Columns) -> Tensor:
        """Compute log-sum-exp [n] over each support, zero for tokens without one.

        Collective over the columns' group.
        """
        places, here = columns.local(self.ids, z.size(1))
        logits = torch.where(here, z[self.tokens, places], -torch.inf)
        # Subtract the maximum over the support, because the current policy may give the whole support a low
        # probability.
        peak = z.new_full((len(z),), -torch.inf).scatter_reduce_(0, self.tokens, logits, "amax")
        if is_shared := columns.is_shared(z):
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=columns.group)
        peak = torch.where(self.is_cut, peak, 0.0)
        sums = z.new_zeros(len(z)).index_add_(0, self.tokens, (logits - peak[self.tokens]).exp_())
        if is_shared:
            dist.all_reduce(sums, group=columns.group)
        return torch.where(self.is_cut, peak + sums.log(), 0.0)
