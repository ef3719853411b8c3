"""The numbers of a step that the loop itself knows."""

from __future__ import annotations

import torch.distributed as dist

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.trainer.exchange import Exchanged
from rlhf_mcore.types import TrainBatch


def rollout_metrics(exchanged: Exchanged) -> dict[str, float]:
    """Rewards and lengths over all rows of the step; equal on every rank."""
    scores, lengths = exchanged.scores, exchanged.response_lengths.double()
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/max": float(scores.max()),
        "reward/min": float(scores.min()),
        **{f"reward/{name}_mean": mean for name, mean in exchanged.part_means.items()},
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_fraction": float(exchanged.truncated.double().mean()),
        "rollout/num_tokens": float(lengths.sum()),
    }


def agreement_metrics(batch: TrainBatch, dp_group: dist.ProcessGroup) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's on the same tokens. Collective over data-parallel ranks."""
    assert batch.old_logprobs is not None
    local = rollout_ratio_statistics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    total = reduce_sums({name: float(value) for name, value in local.items()}, dp_group)
    return {
        "rollout/logprob_diff_mean": total["logprob_diff_sum"] / max(total["num_tokens"], 1.0),
        "rollout/logprob_diff_max": total["logprob_diff_max"],
    }
