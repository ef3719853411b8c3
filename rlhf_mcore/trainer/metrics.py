"""Metrics of a training step that the loop computes itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.types import Field, Ragged, TrainBatch

if TYPE_CHECKING:
    from rlhf_mcore.trainer.scores import ScoreFacts

# Field of an episode's record -> name of the metric with its mean.
TIMES = {
    "seconds": "timing/episode",
    "engine_s": "timing/episode_engine",
    "tools_s": "timing/episode_tools",
    "waiting_s": "timing/episode_waiting",
}
MAX_TOOLS = 32  # tools with separate metrics; limited because the policy may invent tool names
_OTHER = re.compile(r"[^\w.-]", re.ASCII)


def rollout_metrics(batch: TrainBatch, facts: ScoreFacts) -> dict[str, float]:
    """Compute reward and length metrics over all rows of the step."""
    scores, lengths = batch.scores, batch.num_sampled.double()
    branches = [len(batch.sequences.get(row, (0,))) for row in range(batch.num_rows)] if batch.sequences else []
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/max": float(scores.max()),
        "reward/min": float(scores.min()),
        **({"reward/baseline_mean": float(batch.baselines.mean())} if batch.baselines is not None else {}),
        **{f"reward/{kind}s": float(count) for kind, count in facts.failures.items()},
        **({"reward/dropped_prompts": float(facts.num_dropped)} if facts.num_dropped else {}),
        **{f"reward/{name}_mean": mean for name, mean in facts.part_means.items()},
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_fraction": float(batch.truncated.double().mean()),
        "rollout/num_tokens": float(lengths.sum()),
        **({"rollout/branches_mean": sum(branches) / len(branches)} if branches else {}),
        **({"rollout/branches_max": float(max(branches))} if branches else {}),
        **({"timing/prefix_hit": facts.prefix_hit} if facts.prefix_hit is not None else {}),
        **facts.episodes,
    }


def source_metrics(batch: TrainBatch, facts: ScoreFacts) -> dict[str, float]:
    """Compute the shares of responses with score 0 or the highest score, and of prompts whose responses all score the same.

    Such responses and prompts may provide no learning signal. ``reward/parse_failures`` counts the responses in which the reward
    found no answer. If there are several data sources, each source also gets its own mean, shares and count.
    """
    assert batch.prompts is not None
    sources = [prompt.data_source for prompt in batch.prompts]
    scores, unread = batch.scores.reshape(len(sources), -1), facts.unread  # scores: [P, G]
    metrics = _compute_shares(scores) | {"reward/parse_failures": float(sum(unread.values()))}
    if len(names := sorted({*sources, *unread})) > 1:
        for name in names:
            own = scores[torch.tensor([source == name for source in sources])]
            if len(own):
                of_source = {"reward/mean": float(own.mean()), **_compute_shares(own)}
                metrics |= {f"{metric}/{name}": value for metric, value in of_source.items()}
            metrics[f"reward/parse_failures/{name}"] = float(unread.get(name, 0))
    return metrics


def _compute_shares(scores: torch.Tensor) -> dict[str, float]:
    """Compute the shares of scores [P, G]. ``reward/share_max`` uses the highest score in ``scores``; it is 0 if all are equal."""
    same = (scores == scores[:, :1]).all(dim=1)
    highest = (scores == scores.max()) & (scores.max() > scores.min())
    return {
        "reward/share_zero": float((scores == 0).double().mean()),
        "reward/share_max": float(highest.double().mean()),
        "reward/share_same": float(same.double().mean()),
    }


def agreement_metrics(batch: TrainBatch) -> dict[str, float]:
    """Compute the difference between trainer and engine logprobs of the same tokens. Collective over the world."""
    assert batch.old_logprobs is not None
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    statistics = rollout_ratio_statistics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, rows)
    if batch.support is not None and batch.log_mass is not None:
        count = batch.num_sampled.sum().clamp(min=1)
        sizes = rows.sums(batch.support.counts, batch.loss_mask).sum()
        mass = rows.sums(batch.log_mass.exp(), batch.loss_mask).sum()
        statistics |= {"support_size": float(sizes / count), "support_mass": float(mass / count)}
    return {f"rollout/{name}": value for name, value in statistics.items()}


def draft_metrics(drafts: Field) -> dict[str, float]:
    """Compute the acceptance rate per draft depth, and the mean tokens per pass with drafts. Collective over the world.

    See arXiv 2211.17192. ``drafts``: the field ``DRAFTS`` of this rank's tokens, [N, 2]. After a rejected draft token, all deeper
    draft tokens are rejected too.
    """
    assert not isinstance(drafts, Ragged)
    depths = range(1, int(drafts.max()) + 1 if len(drafts) else 1)
    mine = [(drafts >= depth).sum(0).tolist() for depth in depths]
    ranks = zip_longest(*all_gather_json(mine), fillvalue=(0, 0))
    counts = [(sum(drafted for drafted, _ in of_depth), sum(taken for _, taken in of_depth)) for of_depth in ranks]
    if not counts:
        return {}
    shares = {f"rollout/draft_acceptance/{depth}": taken / drafted for depth, (drafted, taken) in enumerate(counts, 1)}
    return shares | {"rollout/draft_pass_tokens": 1 + sum(taken for _, taken in counts) / counts[0][0]}


def sums_of_episodes(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the times of a rank's episodes, as JSON values. ``records``: episode records of trajectories."""
    tools = defaultdict[str, list[float]](list)
    for record in records:
        for node in record["nodes"]:
            for call in node["calls"]:
                if call["ended_s"] is not None:
                    tools[_OTHER.sub("_", call["name"])[:64]].append(call["ended_s"] - call["begun_s"])
    return {
        "count": len(records),
        "turns": sum(len(record["nodes"]) for record in records),
        "first": min(record["unix_time"] for record in records),
        "last": max(record["unix_time"] + record["seconds"] for record in records),
        "times": {name: sum(record[name] for record in records) for name in TIMES},
        "tools": {name: (len(seconds), sum(seconds)) for name, seconds in tools.items()},
    }


def episode_metrics(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute a step's episode metrics from the sums of all ranks.

    No name has the ending of phase metrics (``_s``), because the times of phases add up to the time of a step.
    """
    count = sum(rank["count"] for rank in ranks)
    times = {name: sum(rank["times"][name] for rank in ranks) for name in TIMES}
    span = max(rank["last"] for rank in ranks) - min(rank["first"] for rank in ranks)
    metrics = {
        "rollout/turns_mean": sum(rank["turns"] for rank in ranks) / count,
        **{metric: times[name] / count for name, metric in TIMES.items()},
    }
    if span > 0:
        metrics["timing/concurrent_episodes"] = times["seconds"] / span
        in_tools = sum(spent for rank in ranks for _, spent in rank["tools"].values())
        metrics["timing/concurrent_calls"] = in_tools / span
    tools = defaultdict[str, list[float]](lambda: [0, 0.0])
    for rank in ranks:
        for name, (number, spent) in rank["tools"].items():
            tools[name][0] += number
            tools[name][1] += spent
    for name in sorted(tools, key=lambda name: (-tools[name][0], name))[:MAX_TOOLS]:
        number, spent = tools[name]
        metrics |= {f"rollout/tool_calls/{name}": float(number), f"timing/tool/{name}": spent / number}
    return metrics


@dataclass(slots=True)
class Counters:
    """Sums over all completed steps. ``tokens`` counts the response tokens in the loss."""

    steps: int = 0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0

    def count(self, batch: TrainBatch) -> dict[str, float]:
        """Add one step to the sums. Returns the sums as metrics."""
        self.steps += 1
        self.prompts += len(batch.group_ids.unique())
        self.samples += len(batch.group_ids)
        self.tokens += int(batch.num_sampled.sum())
        return {f"progress/{name}": float(value) for name, value in asdict(self).items() if name != "steps"}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain JSON values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums from ``state``."""
        for name in asdict(self):
            setattr(self, name, int(state[name]))
