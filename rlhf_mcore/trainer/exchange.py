"""From the engines to the trainers: trajectories of all engines become the rows of a step, known to every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.types import FAILURES, Prompt, Score, TrainBatch, Trajectory


@dataclass(slots=True)
class Exchanged:
    """A step's rows, equal on every rank."""

    batch: TrainBatch
    part_means: dict[str, float]  # mean of each named part of the scores
    failures: dict[str, int] = field(default_factory=dict)  # how many responses got no score, by kind: error, timeout


@dataclass(slots=True)
class Exchange:
    """How rows travel."""

    samples_per_prompt: int
    pad_token_id: int

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
            trajectories, scores: those that this rank owns, maybe none.

        Raises:
            RuntimeError: a trajectory is missing, doubled, or has no finite score.
        """
        table, values = _flatten(positions, self.samples_per_prompt, trajectories, scores)
        table, values = all_gather_rows(table), all_gather_rows(values)
        order = table[:, 0].argsort()
        _check_complete(table[order, 0], len(prompts) * self.samples_per_prompt)
        parts = values.split((table[:, 1] + 1).tolist())
        gathered = [parts[place] for place in order.tolist()]
        if without := [row for row, part in enumerate(gathered) if not part[-1, 0].isfinite()]:
            raise RuntimeError(f"rows {without} of the step have no finite score")
        batch = self._batch(prompts, gathered, table[order, 2].tolist())
        return Exchanged(batch, _part_means(scores), _failures(scores))

    def _batch(self, prompts: Sequence[Prompt], gathered: Sequence[Tensor], truncated: Sequence[int]) -> TrainBatch:
        """``gathered`` has for each row [length + 1, 2] float64: (token id, logprob) per token, then (score, 0)."""
        records = [
            Row(
                prompt_ids=prompts[row // self.samples_per_prompt].prompt_ids,
                response_ids=values[:-1, 0].long().tolist(),
                rollout_logprobs=values[:-1, 1].tolist(),
                score=float(values[-1, 0]),
                truncated=bool(truncated[row]),
            )
            for row, values in enumerate(gathered)
        ]
        return make_train_batch(
            records,
            group_ids=[row // self.samples_per_prompt for row in range(len(records))],
            pad_token_id=self.pad_token_id,
        )


def _flatten(
    positions: Sequence[int], samples: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> tuple[Tensor, Tensor]:
    """One integer row a trajectory, and all their tokens in a row. Token ids are exact in float64."""
    table = [
        (position * samples + trajectory.sample, len(trajectory.response_ids), trajectory.finish_reason == "length")
        for position, trajectory in zip(positions, trajectories, strict=True)
    ]
    values: list[tuple[float, float]] = []
    for trajectory, score in zip(trajectories, scores, strict=True):
        values += zip(map(float, trajectory.response_ids), trajectory.rollout_logprobs, strict=True)
        values.append((score.value, 0.0))
    return torch.tensor(table, dtype=torch.int64).reshape(-1, 3), torch.tensor(values, dtype=torch.float64).reshape(
        -1, 2
    )


def _check_complete(rows: Tensor, expected: int) -> None:
    if not torch.equal(rows, torch.arange(expected)):
        raise RuntimeError(
            f"the engines returned {rows.numel()} trajectories, {expected} different ones were asked for"
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
