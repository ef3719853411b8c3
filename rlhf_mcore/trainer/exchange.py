"""From the engines to the trainers: trajectories of all engines become balanced rows of each data-parallel rank.

Which rows form a minibatch depends on the prompts only, never on the layout, so the gradient of an update is the same however many
ranks share it. Within a minibatch rows are spread so that ranks get equal numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.data.balance import balance
from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.types import Prompt, Score, TrainBatch, Trajectory


@dataclass(slots=True)
class Exchanged:
    """A step's rows for this rank, and what the record wants to know of all of them (equal on every rank)."""

    batch: TrainBatch
    scores: Tensor  # [P * G] float64 in row order
    response_lengths: Tensor  # [P * G] int64
    truncated: Tensor  # [P * G] bool: ended by the token limit
    part_means: dict[str, float]  # mean of each named part of the scores


@dataclass(slots=True)
class Exchange:
    """How rows travel. ``dp_rank`` of ``dp_size`` is this rank's place in the actor's layout."""

    dp_rank: int
    dp_size: int
    samples_per_prompt: int
    prompts_per_minibatch: int
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
        lengths = table[order, 1]
        gathered = _Gathered(table[order], _split(values, table[:, 1], order))
        row_scores = torch.stack([part[-1, 0] for part in gathered.values])
        if without := (~row_scores.isfinite()).nonzero().flatten().tolist():
            raise RuntimeError(f"rows {without} of the step have no finite score")
        total = lengths + torch.tensor([len(p.prompt_ids) for p in prompts]).repeat_interleave(self.samples_per_prompt)
        batch = self._local_batch(prompts, gathered, self._share(len(prompts), total))
        return Exchanged(batch, row_scores, lengths, gathered.table[:, 2].bool(), _part_means(scores))

    def _share(self, num_prompts: int, total_lengths: Tensor) -> list[tuple[int, int]]:
        """(row, minibatch) pairs of this data-parallel rank."""
        rows_per_minibatch = self.prompts_per_minibatch * self.samples_per_prompt
        num_rows = num_prompts * self.samples_per_prompt
        mine = []
        for number, first in enumerate(range(0, num_rows, rows_per_minibatch)):
            lengths = total_lengths[first : first + rows_per_minibatch].tolist()
            mine += [(first + place, number) for place in sorted(balance(lengths, self.dp_size)[self.dp_rank])]
        return mine

    def _local_batch(self, prompts: Sequence[Prompt], gathered: _Gathered, share: list[tuple[int, int]]) -> TrainBatch:
        records = []
        for row, _ in share:
            values = gathered.values[row]
            records.append(
                Row(
                    prompt_ids=prompts[row // self.samples_per_prompt].prompt_ids,
                    response_ids=values[:-1, 0].long().tolist(),
                    rollout_logprobs=values[:-1, 1].tolist(),
                    score=float(values[-1, 0]),
                )
            )
        return make_train_batch(
            records,
            row_ids=[row for row, _ in share],
            group_ids=[row // self.samples_per_prompt for row, _ in share],
            minibatch_ids=[minibatch for _, minibatch in share],
            num_rows_global=len(gathered.values),
            num_minibatches=-(-len(prompts) // self.prompts_per_minibatch),
            pad_token_id=self.pad_token_id,
        )


@dataclass(slots=True)
class _Gathered:
    table: Tensor  # [rows, 3] int64: row id, response length, truncated
    values: list[Tensor]  # per row [length + 1, 2] float64: (token id, logprob) per token, then (score, 0)


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


def _split(values: Tensor, lengths: Tensor, order: Tensor) -> list[Tensor]:
    parts = values.split((lengths + 1).tolist())
    return [parts[place] for place in order.tolist()]


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


def _part_sums(scores: Sequence[Score]) -> dict[str, tuple[float, int]]:
    names = {name for score in scores for name in score.parts}
    held = {name: [score.parts[name] for score in scores if name in score.parts] for name in names}
    return {name: (sum(values), len(values)) for name, values in held.items()}
