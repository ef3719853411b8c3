"""From scores to advantages: the only part of the loop between rewards and updates."""

from __future__ import annotations

from rlhf_mcore.algorithms.advantages import broadcast_to_tokens, group_relative
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_mean
from rlhf_mcore.algorithms.shaping import token_rewards
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.types import TrainBatch


def estimate_advantages(batch: TrainBatch, cfg: AlgorithmConfig) -> dict[str, float]:
    """Fill ``rewards``, ``advantages`` and, where a critic is trained, ``returns`` of a batch. The same on every rank."""
    kl = None
    metrics = {}
    if cfg.kl.coef and cfg.kl.placement == "reward":
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, cfg.kl.estimator, mask=batch.loss_mask)
        metrics["reward/kl"] = float(masked_mean(kl, batch.loss_mask))
    batch.rewards = token_rewards(batch.scores, batch.loss_mask, kl, cfg.kl.coef if kl is not None else 0.0)
    by_row = group_relative(batch.rewards.sum(1), batch.group_ids, cfg.normalize_std)
    batch.advantages = broadcast_to_tokens(by_row, batch.loss_mask)
    return metrics
