"""From scores to advantages: the only part of the loop between rewards and updates."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlhf_mcore.algorithms.advantages import broadcast_to_tokens, group_relative
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum
from rlhf_mcore.algorithms.shaping import token_rewards
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.parallel.collectives import all_gather_rows, reduce_sums
from rlhf_mcore.types import TrainBatch


def estimate_advantages(batch: TrainBatch, cfg: AlgorithmConfig, dp_group: dist.ProcessGroup) -> dict[str, float]:
    """Fill ``rewards`` and ``advantages`` of a batch. Collective: a group's rows may lie on several data-parallel ranks."""
    kl = None
    metrics = {}
    if cfg.kl.coef and cfg.kl.placement == "reward":
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, cfg.kl.estimator, mask=batch.loss_mask)
        sums = reduce_sums({"kl": float(masked_sum(kl, batch.loss_mask)), "n": float(batch.loss_mask.sum())}, dp_group)
        metrics["reward/kl"] = sums["kl"] / max(sums["n"], 1.0)
    batch.rewards = token_rewards(batch.scores, batch.loss_mask, kl, cfg.kl.coef if kl is not None else 0.0)
    outcomes = all_gather_rows(batch.rewards.sum(1), dp_group)
    row_ids, group_ids = all_gather_rows(batch.row_ids, dp_group), all_gather_rows(batch.group_ids, dp_group)
    by_row = torch.empty(batch.num_rows_global, dtype=torch.float32)
    by_row[row_ids] = group_relative(outcomes, group_ids, cfg.normalize_std)
    batch.advantages = broadcast_to_tokens(by_row[batch.row_ids], batch.loss_mask)
    return metrics
