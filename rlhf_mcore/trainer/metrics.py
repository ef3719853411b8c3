"""The numbers of a step that the loop itself knows."""

from __future__ import annotations

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics
from rlhf_mcore.trainer.exchange import Exchanged
from rlhf_mcore.types import TrainBatch


def rollout_metrics(exchanged: Exchanged) -> dict[str, float]:
    """Rewards and lengths over all rows of the step."""
    batch = exchanged.batch
    scores, lengths = batch.scores, batch.loss_mask.sum(1).double()
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/max": float(scores.max()),
        "reward/min": float(scores.min()),
        **{f"reward/{name}_mean": mean for name, mean in exchanged.part_means.items()},
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_fraction": float(batch.truncated.double().mean()),
        "rollout/num_tokens": float(lengths.sum()),
    }


def agreement_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's on the same tokens."""
    assert batch.old_logprobs is not None
    found = rollout_ratio_statistics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
    return {
        "rollout/logprob_diff_mean": float(found["logprob_diff_sum"]) / max(float(found["num_tokens"]), 1.0),
        "rollout/logprob_diff_max": float(found["logprob_diff_max"]),
    }
