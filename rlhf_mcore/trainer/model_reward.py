"""A reward model among the graders. All ranks together score the responses of their engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.trainer.exchange import exchange_rows
from rlhf_mcore.types import Score, TrainBatch, Trajectory

PART = "reward_model"  # name of its score among the parts


@dataclass(slots=True)
class ModelReward:
    """Adds the score of a model times ``weight`` to the score of other graders. Without other graders their score is 0."""

    graders: RewardFunction
    compute_scores: Callable[[TrainBatch], Tensor]  # [B], scores of whole responses; collective over the world
    weight: float

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of this rank's trajectories, possibly none. Collective over the world: every rank must call it."""
        return self.add(trajectories, await self.graders.score(trajectories))

    def add(self, trajectories: Sequence[Trajectory], others: Sequence[Score]) -> list[Score]:
        """Return the scores ``others`` of graders with the model's score added. Collective over the world."""
        counts = all_gather_json(len(trajectories))
        if not sum(counts):
            return []
        first = sum(counts[: dist.get_rank()])
        batch = exchange_rows(list(enumerate(trajectories, first)), torch.arange(sum(counts)))
        scores = self.compute_scores(batch)[first : first + len(trajectories)].tolist()
        return [
            replace(other, value=other.value + self.weight * value, parts={**other.parts, PART: value})
            for other, value in zip(others, scores, strict=True)
        ]
