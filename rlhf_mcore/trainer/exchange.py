"""From the engines to the trainers: trajectories of all engines become the rows of a step, each stored on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.data.episodes import flat_fields
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.parallel.rows import move_rows, owners_of, rows_by_rank
from rlhf_mcore.types import FAILURES, Prompt, Score, TrainBatch, Trajectory


@dataclass(slots=True)
class Exchanged:
    """A step's rows."""

    batch: TrainBatch
    part_means: dict[str, float]  # mean of each named part of the scores
    failures: dict[str, int] = field(default_factory=dict)  # how many responses got no score, by kind: error, timeout


@dataclass(frozen=True, slots=True)
class Exchange:
    """How rows travel: numbers of a row to every rank, its tokens to the rank that is to own it."""

    samples_per_prompt: int

    def __call__(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        trajectories: Sequence[Trajectory],
        scores: Sequence[Score],
    ) -> Exchanged:
        """Collective over the world.

        Args:
            prompts: all prompts of the step, the same on every rank.
            positions: for each trajectory the place of its prompt in ``prompts``; a data set smaller than a step repeats prompts.
            trajectories, scores: those that this rank has drawn, maybe none.

        Raises:
            RuntimeError: a trajectory is missing, doubled, or has no finite score.
        """
        numbers = np.array(
            [p * self.samples_per_prompt + t.sample for p, t in zip(positions, trajectories, strict=True)], np.int64
        )
        order = np.argsort(numbers, kind="stable").tolist()
        mine = [trajectories[k] for k in order]
        values = torch.tensor([scores[k].value for k in order], dtype=torch.float64)
        batch = exchange_rows(
            numbers[order], mine, values, len(prompts) * self.samples_per_prompt, self.samples_per_prompt
        )
        return Exchanged(batch, _part_means(scores), _failures(scores))


def exchange_rows(
    numbers: np.ndarray, trajectories: Sequence[Trajectory], scores: Tensor, num_rows: int, rows_per_group: int
) -> TrainBatch:
    """Rows ``numbers`` (ascending), which this rank has drawn, and those of all other ranks as a batch. Collective over the world.

    Raises:
        RuntimeError: the ranks together do not have each of the ``num_rows`` rows once, or a row has no finite score.
    """
    facts = [(len(t.token_ids), t.num_sampled, t.is_truncated, dist.get_rank()) for t in trajectories]
    table = torch.tensor(facts, dtype=torch.int64).reshape(-1, 4)
    table = all_gather_rows(torch.cat([torch.from_numpy(numbers)[:, None], table], dim=1))
    scores = all_gather_rows(scores)
    order = table[:, 0].argsort(stable=True)
    table, scores = table[order], scores[order]
    if not torch.equal(table[:, 0], torch.arange(num_rows)):
        raise RuntimeError(f"the engines returned {len(table)} trajectories, {num_rows} different ones were asked for")
    if not scores.isfinite().all():
        raise RuntimeError(f"rows {(~scores.isfinite()).nonzero().flatten().tolist()} of the step have no finite score")
    _, lengths, num_sampled, truncated, holders = table.unbind(1)
    world_size = dist.get_world_size()
    owners = owners_of(lengths.numpy(), world_size)
    owned = rows_by_rank(owners, world_size)
    moved = move_rows(flat_fields(trajectories), lengths.numpy(), holders.numpy(), owned)
    return TrainBatch(
        lengths=lengths,
        num_sampled=num_sampled,
        scores=scores,
        truncated=truncated.bool(),
        group_ids=torch.arange(num_rows) // rows_per_group,
        owners=torch.from_numpy(owners),
        rows=torch.from_numpy(owned[dist.get_rank()]),
        token_ids=moved["token_ids"],
        loss_mask=moved["loss_mask"],
        rollout_logprobs=moved["rollout_logprobs"],
    )


def _part_means(scores: Sequence[Score]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for rank_sums in all_gather_json(_part_sums(scores)):
        for name, (total, count) in rank_sums.items():
            known = sums.setdefault(name, [0.0, 0.0])
            known[0] += total
            known[1] += count
    return {name: total / count for name, (total, count) in sums.items()}


def _failures(scores: Sequence[Score]) -> dict[str, int]:
    mine = Counter(score.failure for score in scores if score.failure is not None)
    total = sum((Counter(part) for part in all_gather_json(mine)), Counter())
    return {kind: total[kind] for kind in FAILURES}


def _part_sums(scores: Sequence[Score]) -> dict[str, tuple[float, int]]:
    names = {name for score in scores for name in score.parts}
    held = {name: [score.parts[name] for score in scores if name in score.parts] for name in names}
    return {name: (sum(values), len(values)) for name, values in held.items()}
