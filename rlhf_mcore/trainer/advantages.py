"""From scores to advantages: the only part of the loop between what models say and updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_mcore.algorithms.interfaces import AdvantageEstimator, AdvantageInputs
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_mean
from rlhf_mcore.algorithms.registry import find_advantage_estimator
from rlhf_mcore.algorithms.shaping import token_rewards
from rlhf_mcore.algorithms.value_loss import explained_variance, explained_variance_sums
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.types import TrainBatch


@dataclass(slots=True)
class Estimation:
    """Shapes rewards and estimates advantages as the configuration says. The same on every rank, without communication."""

    cfg: AlgorithmConfig
    estimate: AdvantageEstimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimate = find_advantage_estimator(self.cfg.advantage)

    def __call__(self, batch: TrainBatch) -> dict[str, float]:
        """Fill ``rewards``, ``advantages`` and, where a critic is trained, ``returns``. Returns metrics."""
        cfg, metrics, kl = self.cfg, {}, None
        if cfg.kl.coef and cfg.kl.placement == "reward":
            assert batch.old_logprobs is not None and batch.ref_logprobs is not None
            kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, cfg.kl.estimator, mask=batch.loss_mask)
            metrics["reward/kl"] = float(masked_mean(kl, batch.loss_mask))
        batch.rewards = token_rewards(batch.scores, batch.loss_mask, kl, cfg.kl.coef if kl is not None else 0.0)
        inputs = AdvantageInputs(
            batch.rewards, batch.loss_mask, batch.group_ids, batch.truncated, batch.old_values, batch.bootstrap_values
        )
        found = self.estimate(inputs, cfg)
        batch.advantages, batch.returns = found.advantages, found.returns
        if batch.old_values is not None and found.returns is not None:
            sums = explained_variance_sums(batch.old_values, found.returns, batch.loss_mask)
            metrics["critic/explained_variance"] = explained_variance(sums)
            metrics["critic/returns"] = float(masked_mean(found.returns, batch.loss_mask))
        return metrics
