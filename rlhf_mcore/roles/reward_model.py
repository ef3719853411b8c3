"""A reward model: a frozen scorer of whole responses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_mcore.mcore.step import scalar_head
from rlhf_mcore.roles.role import Role
from rlhf_mcore.types import TrainBatch


@dataclass(slots=True)
class RewardModel(Role):
    """A sequence-classification model with one label. The score is what it says at the last token of a row."""

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        """[B] fp32. Collective over the world."""
        return self.per_row(batch, scalar_head)
