"""Convert the trajectories of all engines to the rows of a step. Each row is stored on one trainer rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.data.episodes import flat_fields, flat_support, recorded_fields, token_versions, turn_rewards
from rlhf_mcore.data.prefixes import computed_of_row
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.parallel.rows import move_fields, owners_of, rows_by_rank
from rlhf_mcore.sampling.engine_loop import REMEDY, LostTrajectory
from rlhf_mcore.trainer.batches import Rollout, SampledBatch
from rlhf_mcore.trainer.scores import OnError, ScoreFacts, gather_baselines, gather_facts
from rlhf_mcore.types import Field, Ragged, RowSizes, TrainBatch, Trajectory

# Sizes of all rows -> their owners [B], and ``TrainBatch.replicas``.
ChooseOwners = Callable[[RowSizes], tuple[Tensor, tuple[tuple[int, ...], ...]]]


def spread_owners(sizes: RowSizes) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Choose owners among all ranks of the world, with nearly equal numbers of tokens."""
    return torch.from_numpy(owners_of(sizes.lengths.numpy(), dist.get_world_size())), ()


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends the figures of a row to every rank, and its tokens to the rank that will own the row.

    ``asynchronous``: tokens may come from older weights, so the policy version of each token is sent too.
    ``on_error``: policy for prompts with a response that has no score. ``parts``: names of the score parts that the advantages
    use separately. ``baselines``: each prompt also has a greedy response.
    """

    samples_per_prompt: int
    asynchronous: bool = False
    on_error: OnError = field(default_factory=OnError)
    parts: tuple[str, ...] = ()
    baselines: bool = False
    choose_owners: ChooseOwners = spread_owners

    def __call__(self, sampled: SampledBatch) -> tuple[TrainBatch, ScoreFacts]:
        """Exchange the rows of a step. Returns the batch and the score statistics. Collective over the world.

        Args:
            sampled: all prompts of the step, which may repeat a row of the data, and this rank's rollouts, possibly none.

        Raises:
            ConfigError: on every rank, if too many responses have no score, no prompt remains, or no score contains one of the
                ``parts``.
            LostTrajectory: on every rank, if a trajectory is missing or duplicated.
            RuntimeError: on every rank, if the score of a trajectory is not finite.
        """
        facts, failed, first = gather_facts(sampled, self.on_error)
        kept = self.on_error.surviving_prompts(sampled.prompts, failed, first)
        facts.num_dropped = len(sampled.prompts) - len(kept)
        if facts.num_dropped:
            sampled = sampled.keep(kept)
        prompts, num_samples = sampled.prompts, self.samples_per_prompt

        def name(row: int) -> str:
            place, sample = divmod(row, num_samples)
            return f"prompt {prompts[place].prompt_id!r}, sample {sample}"

        batch = exchange_rows(
            [(self._row_of(each), each.trajectory) for each in sampled.rollouts],
            torch.arange(len(prompts)).repeat_interleave(num_samples),
            name,
            self.asynchronous,
            self.choose_owners,
        )
        batch.prompts = list(prompts)
        self._add_scores(batch, sampled.rollouts, facts)
        if self.baselines:
            batch.baselines = gather_baselines(prompts, sampled.greedy).repeat_interleave(num_samples)
        return batch, facts

    def _row_of(self, rollout: Rollout) -> int:
        return rollout.place * self.samples_per_prompt + rollout.trajectory.sample

    def _add_scores(self, batch: TrainBatch, rollouts: Sequence[Rollout], facts: ScoreFacts) -> None:
        """Set the scores of all rows, and the parts that the advantages use. Collective over the world."""
        for part in self.parts:
            if part not in facts.part_means:
                there = ", ".join(sorted(facts.part_means)) or "none"
                raise ConfigError(
                    f"algorithm.reward_weights names {part!r}, but no score of the step has such a part; there are: {there}"
                )
        own = [
            [self._row_of(each), each.score.value, *(each.score.parts.get(part, 0.0) for part in self.parts)]
            for each in rollouts
        ]
        table = all_gather_rows(torch.tensor(own, dtype=torch.float64).reshape(-1, 2 + len(self.parts)))
        table = table[table[:, 0].argsort(), 1:]
        batch.scores = table[:, 0].contiguous()
        if len(wrong := (~batch.scores.isfinite()).nonzero().flatten()):
            raise RuntimeError(f"rows {wrong.tolist()} of the step have no finite score")
        if self.parts:
            batch.score_parts = table[:, 1:]


class _RowFacts(NamedTuple):
    """Figures of a row that every rank receives. After the gather, each field is a column over all rows."""

    number: Any
    length: Any
    num_sampled: Any
    is_truncated: Any
    holder: Any  # the rank that sampled it
    num_computed: Any  # see ``computed_of_row``
    num_shared: Any

    @classmethod
    def of(cls, number: int, t: Trajectory) -> _RowFacts:
        computed = computed_of_row(t.token_ids, t.loss_mask, t.sequences)
        return cls(number, len(t.token_ids), t.num_sampled, t.is_truncated, dist.get_rank(), *computed)


def exchange_rows(
    rows: Sequence[tuple[int, Trajectory]],
    group_ids: Tensor,
    name: Callable[[int], str] = "row {}".format,
    asynchronous: bool = False,
    choose_owners: ChooseOwners = spread_owners,
) -> TrainBatch:
    """Build a batch from the rows of all ranks, with scores of 0. Collective over the world.

    Args:
        rows: the row numbers and trajectories that this rank sampled.
        group_ids: [B] index of each row's prompt in the step.
        name: returns the name of a row for messages.
        asynchronous: add ``versions`` to the batch.

    Raises:
        LostTrajectory: not all of the B rows exist exactly once over all ranks.
        RuntimeError: engines recorded different fields for different rows.
    """
    rows = sorted(rows, key=lambda row: row[0])
    mine = [_RowFacts.of(*row) for row in rows]
    table = all_gather_rows(torch.tensor(mine, dtype=torch.int64).reshape(-1, len(_RowFacts._fields)))
    facts = _RowFacts(*table[table[:, 0].argsort(stable=True)].unbind(1))
    if not torch.equal(facts.number, torch.arange(len(group_ids))):
        raise LostTrajectory(_describe_miscount(facts.number.tolist(), len(group_ids), name))
    contents = _gather_contents(rows)
    trajectories = [trajectory for _, trajectory in rows]
    fields: dict[str, Field] = dict(flat_fields(trajectories))
    if asynchronous:
        fields["versions"] = token_versions(trajectories)
    if contents.has_rewards:
        fields["turn_rewards"] = turn_rewards(trajectories)
    if contents.has_support:
        fields["support"] = flat_support(trajectories)
    lengths, holders = facts.length.numpy(), facts.holder.numpy()
    computed = torch.stack([facts.num_computed, facts.num_shared], dim=1)
    owners, replicas = choose_owners(RowSizes(facts.length, group_ids, computed))
    owned = rows_by_rank(owners.numpy(), dist.get_world_size())
    moved: dict[str, Any] = move_fields(fields, lengths, holders, owned)
    recorded = move_fields(contents.recorded, lengths, holders, owned)
    return TrainBatch(
        lengths=facts.length,
        num_sampled=facts.num_sampled,
        scores=torch.zeros(len(group_ids), dtype=torch.float64),
        truncated=facts.is_truncated.bool(),
        group_ids=group_ids,
        owners=owners,
        rows=torch.from_numpy(owned[dist.get_rank()]),
        replicas=replicas,
        sequences=contents.sequences,
        images=contents.images,
        computed=computed,
        fields=recorded,
        **moved,
    )


@dataclass(frozen=True, slots=True)
class _Contents:
    """Contents of the trajectories of all ranks, in addition to their tokens."""

    has_rewards: bool  # for single turns
    has_support: bool
    recorded: Mapping[str, Field]  # fields that engines recorded for this rank's tokens
    sequences: Mapping[int, Sequence[int]]  # as in ``TrainBatch``
    images: Mapping[int, Sequence[Sequence[str]]]  # as in ``TrainBatch``


def _gather_contents(rows: Sequence[tuple[int, Trajectory]]) -> _Contents:
    """Return the contents of this rank's rows and of all other rows. Collective over the world.

    Raises:
        RuntimeError: on every rank, if rows have different recorded fields.
    """
    trajectories = [trajectory for _, trajectory in rows]
    recorded, problem = dict[str, Field](), ""
    try:
        recorded = recorded_fields(trajectories)
    except ValueError as error:
        problem = str(error)
    images = [(number, t.sequence_images or (t.prompt.images,)) for number, t in rows]
    ranks = all_gather_json(
        {
            "has_rewards": any(turn.reward for t in trajectories for turn in t.turns),
            "has_support": any(t.support is not None for t in trajectories),
            "forms": {name: _form_of(recorded[name]) for name in sorted(recorded)} if rows else None,
            "problem": problem,
            "sequences": [(number, t.sequences) for number, t in rows if t.sequences],
            "images": [(number, digests) for number, digests in images if any(digests)],
        }
    )
    if problems := [rank["problem"] for rank in ranks if rank["problem"]]:
        raise RuntimeError(problems[0])
    forms, *others = [rank["forms"] for rank in ranks if rank["forms"] is not None]
    if different := [other for other in others if other != forms]:
        raise RuntimeError(f"engines recorded different fields of their tokens: {forms} and {different[0]}")
    return _Contents(
        any(rank["has_rewards"] for rank in ranks),
        any(rank["has_support"] for rank in ranks),
        recorded if rows else {name: _blank_field(*form) for name, form in forms.items()},
        {number: tuple(sizes) for rank in ranks for number, sizes in rank["sequences"]},
        {number: tuple(digests) for rank in ranks for number, digests in rank["images"]},
    )


def _form_of(field: Field) -> tuple[bool, str, list[int]]:
    """Return whether a field is ragged, the dtype of its values, and the shape of a value."""
    values = field.values if isinstance(field, Ragged) else field
    return isinstance(field, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape[1:])


def _blank_field(is_ragged: bool, dtype: str, shape: Sequence[int]) -> Field:
    """Return a field of this form for no tokens."""
    values = torch.zeros(0, *shape, dtype=getattr(torch, dtype))
    return Ragged(torch.zeros(0, dtype=torch.int32), values) if is_ragged else values


def _describe_miscount(rows: Sequence[int], num_rows: int, name: Callable[[int], str]) -> str:
    counts = Counter(rows)
    wrong = [f"none for {name(row)}" for row in range(num_rows) if not counts[row]]
    wrong += [f"{count} for {name(row)}" for row, count in counts.items() if count > 1 and 0 <= row < num_rows]
    return f"the engines returned {len(rows)} trajectories, {num_rows} different ones were asked for: {join_first(wrong)}. {REMEDY}"
