"""Convert the trajectories of all engines to the rows of a step. Each row is stored on one trainer rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError, shortened
from rlhf_mcore.data.bundles import computed_of_row
from rlhf_mcore.data.episodes import flat_fields, flat_support, recorded_fields, token_versions, turn_rewards
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.parallel.rows import move_fields, move_ragged, move_rows, owners_of, rows_by_rank
from rlhf_mcore.sampling.checks import REMEDY, LostTrajectory
from rlhf_mcore.trainer.sampled import SampledBatch
from rlhf_mcore.trainer.scores import OnError, ScoreFacts, gather_baselines, gather_facts
from rlhf_mcore.types import Field, Ragged, TrainBatch, Trajectory


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
        numbered = [(each.place * num_samples + each.trajectory.sample, each) for each in sampled.rollouts]
        numbered.sort(key=lambda pair: pair[0])
        numbers = np.array([number for number, _ in numbered], np.int64)
        values = torch.tensor([each.score.value for _, each in numbered], dtype=torch.float64)
        group_ids = torch.arange(len(prompts)).repeat_interleave(num_samples)

        def name(row: int) -> str:
            place, sample = divmod(row, num_samples)
            return f"prompt {prompts[place].prompt_id!r}, sample {sample}"

        mine = [each.trajectory for _, each in numbered]
        batch = exchange_rows(numbers, mine, values, group_ids, name, self.asynchronous)
        batch.prompts = list(prompts)
        if self.baselines:
            batch.baselines = gather_baselines(prompts, sampled.greedy).repeat_interleave(num_samples)
        if self.parts:
            self._refuse_unknown_parts(facts)
            own = [
                [float(number), *(each.score.parts.get(part, 0.0) for part in self.parts)] for number, each in numbered
            ]
            table = all_gather_rows(torch.tensor(own, dtype=torch.float64).reshape(-1, 1 + len(self.parts)))
            batch.score_parts = table[table[:, 0].argsort(), 1:]
        return batch, facts

    def _refuse_unknown_parts(self, facts: ScoreFacts) -> None:
        for part in self.parts:
            if part not in facts.part_means:
                there = ", ".join(sorted(facts.part_means)) or "none"
                raise ConfigError(
                    f"algorithm.reward_weights names {part!r}, but no score of the step has such a part; there are: {there}"
                )


class _RowFacts(NamedTuple):
    """Figures of a row that every rank receives. After the gather, each field is a column over all rows."""

    number: Any
    length: Any
    num_sampled: Any
    is_truncated: Any
    holder: Any  # the rank that sampled it
    num_computed: Any  # see ``computed_of_row``
    num_shared: Any
    has_rewards: Any  # for single turns
    has_support: Any
    has_fields: Any  # recorded by engines
    has_sequences: Any
    has_images: Any

    @classmethod
    def of(cls, number: int, t: Trajectory) -> _RowFacts:
        return cls(
            number,
            len(t.token_ids),
            t.num_sampled,
            t.is_truncated,
            dist.get_rank(),
            *computed_of_row(t.token_ids, t.loss_mask, t.sequences),
            any(turn.reward for turn in t.turns),
            t.support is not None,
            bool(t.fields),
            bool(t.sequences),
            bool(t.prompt.images),
        )


def exchange_rows(
    numbers: np.ndarray,
    trajectories: Sequence[Trajectory],
    scores: Tensor,
    group_ids: Tensor,
    name: Callable[[int], str] = "row {}".format,
    asynchronous: bool = False,
) -> TrainBatch:
    """Build a batch from the rows of all ranks. This rank sampled rows ``numbers`` (ascending). Collective.

    Args:
        scores: scores of this rank's trajectories.
        group_ids: [B] index of each row's prompt in the step.
        name: returns the name of a row for messages.
        asynchronous: add ``versions`` to the batch.

    Raises:
        LostTrajectory: not all of the B rows exist exactly once over all ranks.
        RuntimeError: the score of a row is not finite, or engines recorded different fields for different rows.
    """
    num_rows, width = len(group_ids), len(_RowFacts._fields)
    mine = [_RowFacts.of(int(number), t) for number, t in zip(numbers, trajectories, strict=True)]
    table = all_gather_rows(torch.tensor(mine, dtype=torch.int64).reshape(-1, width))
    scores = all_gather_rows(scores)
    order = table[:, 0].argsort(stable=True)
    table, scores = table[order], scores[order]
    facts = _RowFacts(*table.unbind(1))
    if not torch.equal(facts.number, torch.arange(num_rows)):
        raise LostTrajectory(_describe_miscount(facts.number.tolist(), num_rows, name))
    if not scores.isfinite().all():
        raise RuntimeError(f"rows {(~scores.isfinite()).nonzero().flatten().tolist()} of the step have no finite score")
    sent = flat_fields(trajectories)
    if asynchronous:
        sent["versions"] = token_versions(trajectories)
    if facts.has_rewards.any():
        sent["turn_rewards"] = turn_rewards(trajectories)
    sequences = _of_all_rows(numbers, [t.sequences for t in trajectories]) if facts.has_sequences.any() else {}
    images = {}
    if facts.has_images.any():
        images = _of_all_rows(numbers, [t.sequence_images or (t.prompt.images,) for t in trajectories])
    lengths, holders = facts.length, facts.holder.numpy()
    owners = owners_of(lengths.numpy(), dist.get_world_size())
    owned = rows_by_rank(owners, dist.get_world_size())
    moved = move_rows(sent, lengths.numpy(), holders, owned)
    support = None
    if facts.has_support.any():
        support = move_ragged(flat_support(trajectories), lengths.numpy(), holders, owned)
    fields: dict[str, Field] = {}
    if facts.has_fields.any():
        fields = move_fields(_agree_on_fields(trajectories), lengths.numpy(), holders, owned)
    return TrainBatch(
        lengths=lengths,
        num_sampled=facts.num_sampled,
        scores=scores,
        truncated=facts.is_truncated.bool(),
        group_ids=group_ids,
        owners=torch.from_numpy(owners),
        rows=torch.from_numpy(owned[dist.get_rank()]),
        token_ids=moved["token_ids"],
        loss_mask=moved["loss_mask"],
        rollout_logprobs=moved["rollout_logprobs"],
        sequences=sequences,
        images=images,
        computed=torch.stack([facts.num_computed, facts.num_shared], dim=1),
        turn_rewards=moved.get("turn_rewards"),
        versions=moved.get("versions"),
        support=support,
        fields=fields,
    )


def _agree_on_fields(trajectories: Sequence[Trajectory]) -> dict[str, Field]:
    """Return the fields that engines recorded for this rank's tokens; empty fields if it has no tokens. Collective over the world.

    Raises:
        RuntimeError: on every rank, if rows have different fields.
    """
    recorded, problem = dict[str, Field](), ""
    try:
        recorded = recorded_fields(trajectories)
    except ValueError as error:
        problem = str(error)

    def form(field: Field) -> list[Any]:
        values = field.values if isinstance(field, Ragged) else field
        return [isinstance(field, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape[1:])]

    mine = {name: form(recorded[name]) for name in sorted(recorded)} if trajectories else None
    ranks = all_gather_json([problem, mine])
    if problems := [of_rank for of_rank, _ in ranks if of_rank]:
        raise RuntimeError(problems[0])
    forms, *others = [of_rank for _, of_rank in ranks if of_rank is not None]
    if different := [other for other in others if other != forms]:
        raise RuntimeError(f"engines recorded different fields of their tokens: {forms} and {different[0]}")
    if trajectories:
        return recorded
    blanks: dict[str, Field] = {}
    for name, (is_ragged, dtype, shape) in forms.items():
        values = torch.zeros(0, *shape, dtype=getattr(torch, dtype))
        blanks[name] = Ragged(torch.zeros(0, dtype=torch.int32), values) if is_ragged else values
    return blanks


def _of_all_rows(numbers: np.ndarray, values: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
    """Return the values of all ranks' rows by row number. Rows with empty values are omitted. Collective."""
    own = [(int(number), value) for number, value in zip(numbers, values, strict=True) if any(value)]
    return {number: tuple(value) for of_rank in all_gather_json(own) for number, value in of_rank}


def _describe_miscount(rows: Sequence[int], num_rows: int, name: Callable[[int], str]) -> str:
    counts = Counter(rows)
    wrong = [f"none for {name(row)}" for row in range(num_rows) if not counts[row]]
    wrong += [f"{count} for {name(row)}" for row, count in counts.items() if count > 1 and 0 <= row < num_rows]
    return f"the engines returned {len(rows)} trajectories, {num_rows} different ones were asked for: {shortened(wrong)}. {REMEDY}"
