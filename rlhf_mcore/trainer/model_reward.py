"""A reward model among the graders: all ranks score together what their engines have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.trainer.parts import ScoreModel
from rlhf_mcore.types import Score, TrainBatch, Trajectory

PART = "reward_model"  # name of its score among the parts


@dataclass(slots=True)
class ModelReward:
    """The score of a model times ``weight``, added to that of other graders (which may be none: a score of 0)."""

    graders: RewardFunction
    model: ScoreModel
    weight: float
    pad_token_id: int

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Collective over the world: every rank calls it, with none or some trajectories of its own."""
        others = self.graders.score(trajectories)
        batch, first = self._gather(trajectories)
        if not len(batch.lengths):
            return []
        said = self.model.compute_scores(batch)[first : first + len(trajectories)].tolist()
        return [
            Score(other.value + self.weight * value, {**other.parts, PART: value}, other.failure)
            for other, value in zip(others, said, strict=True)
        ]

    def _gather(self, trajectories: Sequence[Trajectory]) -> tuple[TrainBatch, int]:
        """The responses of all ranks, and which of them is this rank's first."""
        sizes = [[len(t.prompt.prompt_ids), len(t.response_ids)] for t in trajectories]
        tokens = [token for t in trajectories for token in (*t.prompt.prompt_ids, *t.response_ids)]
        counts = all_gather_json(len(trajectories))
        all_sizes = all_gather_rows(torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2)).tolist()
        parts = all_gather_rows(torch.tensor(tokens, dtype=torch.int64)).split([sum(pair) for pair in all_sizes])
        rows = []
        for (prompt, response), ids in zip(all_sizes, parts, strict=True):
            whole = ids.tolist()
            rows.append(Row(whole[:prompt], whole[prompt:], [0.0] * response, 0.0))
        return make_train_batch(rows, range(len(rows)), self.pad_token_id), sum(counts[: dist.get_rank()])
