"""From the engines to the trainers: trajectories of all engines become the rows of a step, each stored on one rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError, shortened
from rlhf_mcore.data.episodes import flat_fields, flat_support
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.parallel.ragged import move_ragged, split_tokens
from rlhf_mcore.parallel.rows import move_rows, owners_of, rows_by_rank
from rlhf_mcore.trainer.failures import OnError
from rlhf_mcore.trainer.rollouts import REMEDY, LostTrajectory
from rlhf_mcore.types import FAILURES, Field, Prompt, Ragged, Score, TrainBatch, Trajectory


@dataclass(slots=True)
class ScoreFacts:
    """Facts of the scores of a step over all ranks, including those of prompts that leave the step."""

    part_means: dict[str, float] = field(default_factory=dict)  # of each named part
    failures: dict[str, int] = field(default_factory=dict)  # how many responses got no score, by kind: error, timeout
    unread: dict[str, int] = field(default_factory=dict)  # by data source: in how many responses no answer was found
    num_dropped: int = 0  # prompts that have left the step
    # Share of the tokens before turns of the policy that engines had cached; None: no engine counts them.
    prefix_hit: float | None = None
    episodes: dict[str, float] = field(default_factory=dict)  # metrics of the times of episodes


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends the numbers of a row to every rank, and its tokens to the rank that is to own it.

    ``asynchronous``: tokens may be older than the weights that learn from them, so the policy version of each travels too.
    ``on_error``: what becomes of prompts with a response that has no score. ``parts``: names of parts of the scores that are learned
    from one by one. ``baselines``: each prompt has a greedy response too.
    """

    samples_per_prompt: int
    asynchronous: bool = False
    on_error: OnError = field(default_factory=OnError)
    parts: tuple[str, ...] = ()
    baselines: bool = False

    def __call__(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        trajectories: Sequence[Trajectory],
        scores: Sequence[Score],
        left_out: Sequence[Score] = (),
        greedy: Mapping[int, Score] = MappingProxyType({}),
    ) -> tuple[TrainBatch, ScoreFacts]:
        """Exchange the rows of a step, and what is known of their scores. Collective over the world.

        Args:
            prompts: all prompts of the step, the same on every rank.
            positions: for each trajectory the place of its prompt in ``prompts``; a data set smaller than a step repeats prompts.
            trajectories, scores: those that this rank has drawn, maybe none.
            left_out: scores of responses that this rank has drawn in vain; failures among them count.
            greedy: scores of the greedy responses that this rank has drawn, by the place of their prompt.

        Raises:
            ConfigError: on every rank, too many responses have no score, no prompt is left, or no score has one of the ``parts``.
            LostTrajectory: on every rank, a trajectory is missing, doubled, or arrives changed.
            RuntimeError: on every rank, a trajectory has no finite score.
        """
        facts, failed, first = _gather_facts(positions, trajectories, scores, left_out, greedy, self.on_error)
        kept = self.on_error.left(prompts, failed, first)
        facts.num_dropped = len(prompts) - len(kept)
        if facts.num_dropped:
            place_of = {place: number for number, place in enumerate(kept)}
            mine_left = [k for k, place in enumerate(positions) if place in place_of]
            prompts = [prompts[place] for place in kept]
            positions = [place_of[positions[k]] for k in mine_left]
            trajectories, scores = [trajectories[k] for k in mine_left], [scores[k] for k in mine_left]
            greedy = {place_of[place]: score for place, score in greedy.items() if place in place_of}
        num_samples = self.samples_per_prompt
        numbers = np.array([p * num_samples + t.sample for p, t in zip(positions, trajectories, strict=True)], np.int64)
        order = np.argsort(numbers, kind="stable").tolist()
        mine = [trajectories[k] for k in order]
        values = torch.tensor([scores[k].value for k in order], dtype=torch.float64)
        group_ids = torch.arange(len(prompts)).repeat_interleave(num_samples)

        def name(row: int) -> str:
            place, sample = divmod(row, num_samples)
            return f"prompt {prompts[place].prompt_id!r}, sample {sample}"

        batch = exchange_rows(numbers[order], mine, values, group_ids, name, self.asynchronous)
        batch.prompts = list(prompts)
        if self.baselines:
            from rlhf_mcore.trainer.greedy import gather_baselines

            batch.baselines = gather_baselines(prompts, greedy).repeat_interleave(num_samples)
        if self.parts:
            self._refuse_unknown_parts(facts)
            own = [[float(numbers[k]), *(scores[k].parts.get(part, 0.0) for part in self.parts)] for k in order]
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


def exchange_rows(
    numbers: np.ndarray,
    trajectories: Sequence[Trajectory],
    scores: Tensor,
    group_ids: Tensor,
    name: Callable[[int], str] = "row {}".format,
    asynchronous: bool = False,
) -> TrainBatch:
    """Make a batch of rows ``numbers`` (ascending), which this rank has drawn, and of those of all other ranks. Collective.

    Args:
        scores: of the trajectories.
        group_ids: [B] which prompt of the step each row belongs to.
        name: of a row, for messages.
        asynchronous: the batch has ``versions``.

    Raises:
        LostTrajectory: the ranks together do not have each of the B rows once, or a row is not what it was when it has arrived.
        RuntimeError: a row has no finite score, or engines recorded other fields of it than of others.
    """
    num_rows, support = len(group_ids), flat_support(trajectories)
    sent, recorded, problem = _fields_to_send(trajectories, asynchronous)
    facts = [(len(t.token_ids), t.num_sampled, t.is_truncated, dist.get_rank(), _optional(t)) for t in trajectories]
    mine = torch.tensor(facts, dtype=torch.int64).reshape(-1, 5)
    digests = row_digests(
        sent, mine[:, 0].tolist(), {_OWN + name: field for name, field in recorded.items()} | {"support": support}
    )
    table = all_gather_rows(torch.cat([torch.from_numpy(numbers)[:, None], mine, digests[:, None]], dim=1))
    scores = all_gather_rows(scores)
    order = table[:, 0].argsort(stable=True)
    table, scores = table[order], scores[order]
    if not torch.equal(table[:, 0], torch.arange(num_rows)):
        raise LostTrajectory(_describe_miscount(table[:, 0].tolist(), num_rows, name))
    if not scores.isfinite().all():
        raise RuntimeError(f"rows {(~scores.isfinite()).nonzero().flatten().tolist()} of the step have no finite score")
    _, lengths, num_sampled, truncated, holders, optional, digests = table.unbind(1)
    if (optional & _REWARDED).any():
        from rlhf_mcore.data.token_fields import turn_rewards

        sent["turn_rewards"] = turn_rewards(trajectories)
    are_several, see = bool((optional & _SEVERAL).any()), bool((optional & _SEEING).any())
    sequences = _of_all_rows(numbers, [t.sequences for t in trajectories]) if are_several else {}
    images = _of_all_rows(numbers, [t.sequence_images or (t.prompt.images,) for t in trajectories]) if see else {}
    owners = owners_of(lengths.numpy(), dist.get_world_size())
    owned = rows_by_rank(owners, dist.get_world_size())
    rows = torch.from_numpy(owned[dist.get_rank()])
    moved = move_rows(sent, lengths.numpy(), holders.numpy(), owned)
    own_support = None
    if (optional & _SUPPORTED).any():
        own_support = move_ragged(support, lengths.numpy(), holders.numpy(), owned)
    own_fields: dict[str, Field] = {}
    if (optional & _RECORDED).any():
        from rlhf_mcore.trainer.recorded_fields import as_everywhere, move_fields

        recorded = as_everywhere(recorded, problem, draws=bool(trajectories))
        own_fields = move_fields(recorded, lengths.numpy(), holders.numpy(), owned)
    checked = {name: values for name, values in moved.items() if name != "turn_rewards"}
    others = {_OWN + name: field for name, field in own_fields.items()}
    arrived = row_digests(checked, lengths[rows].tolist(), others | ({"support": own_support} if own_support else {}))
    _refuse_changed(rows[arrived != digests[rows]].tolist(), name)
    return TrainBatch(
        lengths=lengths,
        num_sampled=num_sampled,
        scores=scores,
        truncated=truncated.bool(),
        group_ids=group_ids,
        owners=torch.from_numpy(owners),
        rows=rows,
        token_ids=moved["token_ids"],
        loss_mask=moved["loss_mask"],
        rollout_logprobs=moved["rollout_logprobs"],
        sequences=sequences,
        images=images,
        turn_rewards=moved.get("turn_rewards"),
        versions=moved.get("versions"),
        support=own_support,
        fields=own_fields,
    )


def _fields_to_send(
    trajectories: Sequence[Trajectory], asynchronous: bool
) -> tuple[dict[str, Tensor], dict[str, Field], str]:
    """Return fields of tokens, what engines recorded of them, and what is wrong with that, for all ranks to raise together."""
    sent, recorded, problem = flat_fields(trajectories), dict[str, Field](), ""
    if any(trajectory.fields for trajectory in trajectories):
        from rlhf_mcore.data.token_fields import recorded_fields

        try:
            recorded = recorded_fields(trajectories)
        except ValueError as error:
            problem = str(error)
    if asynchronous:
        from rlhf_mcore.data.token_fields import token_versions

        sent["versions"] = token_versions(trajectories)
    return sent, recorded, problem


def _refuse_changed(changed: list[int], name: Callable[[int], str]) -> None:
    """Raise on all ranks if rows have changed on their way to any of them. Collective."""
    if lost := sorted(row for changed_here in all_gather_json(changed) for row in changed_here):
        raise LostTrajectory(
            f"{len(lost)} trajectories have arrived at another rank as something else than was sent, the first is that of "
            f"{name(lost[0])}. {REMEDY}"
        )


def _of_all_rows(numbers: np.ndarray, values: Sequence[Sequence[Any]]) -> dict[int, Sequence[Any]]:
    """Return what rows of all ranks have, by their numbers; rows with nothing are not there. Collective."""
    own = [(int(number), value) for number, value in zip(numbers, values, strict=True) if any(value)]
    return {number: tuple(value) for of_rank in all_gather_json(own) for number, value in of_rank}


# What a row may have beside its tokens: rewards of turns, a support, what engines recorded, several sequences, images.
_REWARDED, _SUPPORTED, _RECORDED, _SEVERAL, _SEEING = 1, 2, 4, 8, 16
_OWN = "recorded "  # before the name of a field that an engine recorded, where it is beside ours


def _optional(trajectory: Trajectory) -> int:
    rewarded = any(turn.reward for turn in trajectory.turns)
    recorded = _RECORDED * bool(trajectory.fields)
    several, seeing = _SEVERAL * bool(trajectory.sequences), _SEEING * bool(trajectory.prompt.images)
    return _REWARDED * rewarded + _SUPPORTED * (trajectory.support is not None) + recorded + several + seeing


def row_digests(fields: Mapping[str, Tensor], lengths: Sequence[int], others: Mapping[str, Field]) -> Tensor:
    """Hash all fields of each row, whose tokens are back to back: [rows] int64. Ragged ones without a value leave no trace."""
    tensors = dict(fields) | {name: field for name, field in others.items() if isinstance(field, Tensor)}
    flat = [tensors[name].numpy() for name in sorted(tensors)]
    ragged = [split_tokens(field, lengths) for _, field in sorted(others.items()) if isinstance(field, Ragged)]
    digests, start = np.empty(len(lengths), np.uint64), 0
    for row, length in enumerate(lengths):
        digest = xxhash.xxh3_64()
        for values in flat:
            digest.update(values[start : start + length].tobytes())
        for parts in ragged:
            if len(parts[row].values):
                digest.update(parts[row].counts.numpy().tobytes())
                digest.update(parts[row].values.numpy().tobytes())
        digests[row], start = digest.intdigest(), start + length
    return torch.from_numpy(digests.view(np.int64))


def _describe_miscount(rows: Sequence[int], num_rows: int, name: Callable[[int], str]) -> str:
    counts = Counter(rows)
    wrong = [f"none for {name(row)}" for row in range(num_rows) if not counts[row]]
    wrong += [f"{count} for {name(row)}" for row, count in counts.items() if count > 1 and 0 <= row < num_rows]
    return f"the engines returned {len(rows)} trajectories, {num_rows} different ones were asked for: {shortened(wrong)}. {REMEDY}"


def _gather_facts(
    positions: Sequence[int],
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    left_out: Sequence[Score],
    greedy: Mapping[int, Score],
    on_error: OnError,
) -> tuple[ScoreFacts, set[int], str]:
    """Return facts, the places of prompts that have a response without a score, and the first cause. Collective over the world.

    Raises:
        ConfigError: on every rank, too many responses have no score.
    """
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    failed = [score for score in (*scores, *left_out, *greedy.values()) if score.failure is not None]
    mine = {
        "sums": {name: (sum(values), len(values)) for name, values in parts.items()},
        "failures": Counter(score.failure for score in failed),
        "unread": Counter(t.prompt.data_source for t, s in zip(trajectories, scores, strict=True) if not s.answered),
        "places": [
            place
            for place, score in (*zip(positions, scores, strict=True), *greedy.items())
            if score.failure is not None
        ],
        "causes": [score.cause or score.failure for score in failed[:1]],
        "total": len(scores) + len(left_out) + len(greedy),
        "prefix": (sum(t.num_cached for t in trajectories), sum(t.num_prefilled for t in trajectories)),
    }
    if any(t.record is not None for t in trajectories):
        from rlhf_mcore.trainer.episode_metrics import sums_of_episodes

        mine["episodes"] = sums_of_episodes([t.record for t in trajectories if t.record is not None])
    totals, counts, failures, unread = defaultdict[str, float](float), Counter[str](), Counter[str](), Counter[str]()
    ranks = all_gather_json(mine)
    for rank in ranks:
        failures.update(rank["failures"])
        unread.update(rank["unread"])
        for name, (total, count) in rank["sums"].items():
            totals[name] += total
            counts[name] += count
    first = next((cause for rank in ranks for cause in rank["causes"]), "")
    on_error.refuse_too_many(failures.total(), sum(rank["total"] for rank in ranks), first)
    means = {name: totals[name] / counts[name] for name in counts}
    facts = ScoreFacts(means, {kind: failures[kind] for kind in FAILURES}, dict(unread))
    if prefilled := sum(rank["prefix"][1] for rank in ranks):
        facts.prefix_hit = sum(rank["prefix"][0] for rank in ranks) / prefilled
    if episodes := [rank["episodes"] for rank in ranks if "episodes" in rank]:
        from rlhf_mcore.trainer.episode_metrics import episode_metrics

        facts.episodes = episode_metrics(episodes)
    return facts, {place for rank in ranks for place in rank["places"]}, first
