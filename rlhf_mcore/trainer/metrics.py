"""The numbers of a step that the loop itself knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics
from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.trainer.exchange import ScoreFacts
from rlhf_mcore.types import TrainBatch


def rollout_metrics(batch: TrainBatch, facts: ScoreFacts) -> dict[str, float]:
    """Compute rewards and lengths over all rows of the step."""
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
    """Compute shares of what teaches nothing: responses that score 0 or the most, prompts whose responses all score the same.

    The number of responses in which the reward found no answer is among them. With several data sources each has its own mean, shares
    and number.
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
    """Compute the shares of scores [P, G]. The highest score is that of these; if all are the same, there is none."""
    same = (scores == scores[:, :1]).all(dim=1)
    highest = (scores == scores.max()) & (scores.max() > scores.min())
    return {
        "reward/share_zero": float((scores == 0).double().mean()),
        "reward/share_max": float(highest.double().mean()),
        "reward/share_same": float(same.double().mean()),
    }


def agreement_metrics(batch: TrainBatch) -> dict[str, float]:
    """Compute how far the trainer's logprobs are from the engine's on the same tokens. Collective over the world."""
    assert batch.old_logprobs is not None
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    statistics = rollout_ratio_statistics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, rows)
    if batch.support is not None and batch.log_mass is not None:
        count = batch.num_sampled.sum().clamp(min=1)
        sizes = rows.sums(batch.support.counts, batch.loss_mask).sum()
        mass = rows.sums(batch.log_mass.exp(), batch.loss_mask).sum()
        statistics |= {"support_size": float(sizes / count), "support_mass": float(mass / count)}
    return {f"rollout/{name}": value for name, value in statistics.items()}


@dataclass(slots=True)
class Counters:
    """Sums over the steps that were made. ``tokens`` are those of responses, which carry the loss."""

    steps: int = 0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0

    def count(self, batch: TrainBatch) -> dict[str, float]:
        """Count one more step. Returns the sums as metrics."""
        self.steps += 1
        self.prompts += len(batch.group_ids.unique())
        self.samples += len(batch.group_ids)
        self.tokens += int(batch.num_sampled.sum())
        return {f"progress/{name}": float(value) for name, value in asdict(self).items() if name != "steps"}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as plain JSON values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from these sums."""
        for name in asdict(self):
            setattr(self, name, int(state[name]))
