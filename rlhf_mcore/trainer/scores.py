"""Score statistics of a step over all ranks: means, responses without a score, and scores of greedy responses."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.sampling.engine_loop import REMEDY, LostTrajectory
from rlhf_mcore.trainer.batches import Rollout, SampledBatch
from rlhf_mcore.trainer.metrics import episode_metrics, sums_of_episodes
from rlhf_mcore.types import FAILURES, Prompt

_CORRECT_REWARD = "Correct the reward, or raise reward.max_error_share"


@dataclass(frozen=True, slots=True)
class OnError:
    """The policy for responses without a score: they count as 0, or with ``drop`` their prompts are removed from the step.

    ``max_share``: largest allowed share of such responses in a step, over all ranks. With ``reward.on_error: fail``, the error is
    raised before this policy applies.
    """

    drop: bool = False
    max_share: float = 1.0

    @classmethod
    def of(cls, cfg: RewardConfig) -> OnError:
        return cls(cfg.on_error == "drop", 1.0 if cfg.on_error == "fail" else cfg.max_error_share)

    def refuse_too_many(self, failed: int, total: int, first: str) -> None:
        """Raise ConfigError if ``failed`` is more than the allowed share of ``total`` responses. ``first``: the first cause."""
        if failed > self.max_share * total:
            raise ConfigError(
                f"{failed} of {total} responses got no score, more than reward.max_error_share={self.max_share:g}; the first: "
                f"{first}. {_CORRECT_REWARD}"
            )

    def surviving_prompts(self, prompts: Sequence[Prompt], failed: set[int], first: str) -> list[int]:
        """Return the indices of the prompts to keep. ``failed``: indices of prompts with a response that has no score.

        Raises:
            ConfigError: no prompt would remain.
        """
        kept = [place for place in range(len(prompts)) if not (self.drop and place in failed)]
        if prompts and not kept:
            raise ConfigError(
                f"each of the {len(prompts)} prompts of a step has a response without a score, so that reward.on_error=drop leaves "
                f"nothing to learn from; the first: {first}. Correct it"
            )
        return kept


@dataclass(slots=True)
class ScoreFacts:
    """Statistics of the scores of a step over all ranks, including scores of prompts that are removed from the step."""

    part_means: dict[str, float] = field(default_factory=dict)  # mean per named part
    failures: dict[str, int] = field(default_factory=dict)  # responses without a score per kind: error, timeout
    unread: dict[str, int] = field(default_factory=dict)  # responses without a found answer, per data source
    num_dropped: int = 0  # prompts removed from the step
    # Share of cached tokens among the tokens before the policy's turns; None: no engine counts them.
    prefix_hit: float | None = None
    episodes: dict[str, float] = field(default_factory=dict)  # metrics of the times of episodes


def gather_facts(sampled: SampledBatch, on_error: OnError) -> tuple[ScoreFacts, set[int], str]:
    """Return statistics, the indices of prompts with a response that has no score, and the first cause. Collective over the world.

    Raises:
        ConfigError: on every rank, if too many responses have no score.
    """
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for each in sampled.rollouts:
        for name, value in each.score.parts.items():
            parts[name].append(value)
    trajectories = [each.trajectory for each in sampled.rollouts]
    scores = [each.score for each in sampled.rollouts] + sampled.left_out + [each.score for each in sampled.greedy]
    failed = [score for score in scores if score.failure is not None]
    mine = {
        "sums": {name: (sum(values), len(values)) for name, values in parts.items()},
        "failures": Counter(score.failure for score in failed),
        "unread": Counter(each.trajectory.prompt.data_source for each in sampled.rollouts if not each.score.answered),
        "places": [each.place for each in (*sampled.rollouts, *sampled.greedy) if each.score.failure is not None],
        "causes": [score.cause or score.failure for score in failed[:1]],
        "total": len(scores),
        "prefix": (sum(t.num_cached for t in trajectories), sum(t.num_prefilled for t in trajectories)),
    }
    if any(t.record is not None for t in trajectories):
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
        facts.episodes = episode_metrics(episodes)
    return facts, {place for rank in ranks for place in rank["places"]}, first


def gather_baselines(prompts: Sequence[Prompt], greedy: Sequence[Rollout]) -> Tensor:
    """Return the score of each prompt's greedy response: [P] float64. Collective over the world.

    Raises:
        LostTrajectory: a prompt does not have exactly one greedy response.
        RuntimeError: the score of a greedy response is not finite.
    """
    own = [[float(each.place), each.score.value] for each in greedy]
    table = all_gather_rows(torch.tensor(own, dtype=torch.float64).reshape(-1, 2))
    table = table[table[:, 0].argsort()]
    if not torch.equal(table[:, 0], torch.arange(len(prompts), dtype=torch.float64)):
        raise LostTrajectory(f"the engines returned {len(table)} greedy responses for {len(prompts)} prompts. {REMEDY}")
    if len(wrong := (~table[:, 1].isfinite()).nonzero().flatten()):
        raise RuntimeError(f"the greedy response to prompt {prompts[int(wrong[0])].prompt_id!r} has no finite score")
    return table[:, 1]
