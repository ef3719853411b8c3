"""A reward model: a frozen scorer of whole responses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_mcore.mcore.step import scalar_head
from rlhf_mcore.roles.role import RoleModel
from rlhf_mcore.types import TrainBatch


@dataclass(slots=True)
class RewardModel:
    """A sequence-classification model with one label. The score of a row is its output at the row's last token."""

    model: RoleModel

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        """[B] fp32, on every rank. Collective over the world."""
        return self.model.per_row(batch, scalar_head)
