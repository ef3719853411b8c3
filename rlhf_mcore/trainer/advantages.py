"""Compute rewards and advantages from scores, between the forward passes of the models and their updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rlhf_mcore.algorithms.correction import rollout_correction, staleness_factors, takes_part
from rlhf_mcore.algorithms.interfaces import AdvantageEstimator, AdvantageInputs, pick_fields
from rlhf_mcore.algorithms.kl import AdaptiveKL, FixedKL, LinearKL, kl_penalty, reverse_kl
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.registry import find_advantage_estimator
from rlhf_mcore.algorithms.returns import overlong_penalty, token_rewards
from rlhf_mcore.algorithms.value_loss import explained_variance, explained_variance_sums
from rlhf_mcore.config.choices import READS_COVARIANCE
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.types import TEACHER_LOGPROBS, TrainBatch

KLController = FixedKL | AdaptiveKL | LinearKL


def build_kl_controller(cfg: KLConfig) -> KLController:
    """Build the controller of a valid, resolved configuration.

    Raises:
        ConfigError: a linear controller has no number of steps.
    """
    controller = cfg.controller
    if controller.target is not None:
        return AdaptiveKL(cfg.coef, controller.target, controller.gain)
    if controller.final is None:
        return FixedKL(cfg.coef)
    if controller.steps is None:
        raise ConfigError("algorithm.kl.controller.steps=null, but final is set; give it the number of steps")
    return LinearKL(cfg.coef, controller.final, controller.steps)


@dataclass(slots=True)
class AdvantageComputer:
    """Shapes rewards and estimates advantages as configured.

    Every rank estimates the advantages of its own rows. ``merge`` adds per-row sums over the ranks, so that all ranks use equal sums.
    """

    cfg: AlgorithmConfig
    merge: Callable[[Tensor], Tensor] = merge_rows
    teacher_coef: float = 0.0  # weight of a teacher in the advantages; 0: no teacher term
    estimate: AdvantageEstimator = field(init=False)
    kl_controller: KLController = field(init=False)

    def __post_init__(self) -> None:
        self.estimate = find_advantage_estimator(self.cfg.advantage)
        self.kl_controller = build_kl_controller(self.cfg.kl)

    def __call__(self, batch: TrainBatch) -> dict[str, float]:
        """Set the batch fields ``correction``, ``kl_coef``, ``rewards``, ``advantages`` and ``returns``. Returns metrics.

        If the update's own forward pass provides ``old_logprobs``, the caller must call ``compare`` after it. Collective over the
        world.
        """
        rows = OwnedRows(batch.rows, batch.lengths, self.merge)
        metrics: dict[str, float] = {}
        scores, kl, coef = batch.scores, None, self.kl_controller.coef
        if batch.ref_logprobs is not None and self.cfg.kl.placement == "reward":
            kl = self._kl(batch)
        if batch.old_logprobs is not None:
            metrics = self.compare(batch)
        elif batch.versions is not None and takes_part(
            self.cfg.rollout_correction.model_copy(update={"mode": "off"}), True
        ):
            staleness = batch.policy_version - batch.versions
            batch.correction = staleness_factors(staleness, batch.loss_mask, rows, self.cfg.rollout_correction)
        if self.cfg.overlong.enabled:
            overlong = self.cfg.overlong
            assert overlong.max_tokens is not None and overlong.cache_tokens is not None, "resolved"
            penalty = overlong_penalty(batch.num_sampled, overlong.max_tokens, overlong.cache_tokens, overlong.penalty)
            scores = scores + penalty
            metrics["reward/overlong_mean"] = float(penalty.mean())
        batch.kl_coef = coef if kl is None else 0.0
        in_reward = 0.0 if kl is None else coef
        batch.rewards = token_rewards(scores, batch.loss_mask, rows, kl, in_reward, batch.turn_rewards)
        metrics |= self._advantages(batch, batch.rewards, rows)
        if self.teacher_coef:
            metrics |= self._add_teacher(batch, rows)
        return metrics

    def needs_old_logprobs(self, batch: TrainBatch) -> bool:
        """Return whether the update needs ``old_logprobs`` in advance.

        Possible reasons: a teacher, a KL in the reward, the loss, masked truncated rows, a correction of whole sequences, or the
        configuration.
        """
        kl, correction = self.cfg.kl, self.cfg.rollout_correction
        in_reward = bool(kl.coef) and kl.placement == "reward"
        whole = correction.mode in ("sequence", "geometric") or correction.veto is not None
        reads = self.cfg.policy_loss in READS_COVARIANCE
        masks = self.cfg.mask_truncated and bool(
            batch.truncated.any()
        )  # the update computes no logprobs of these tokens
        if self.teacher_coef or in_reward or reads or masks:
            return True
        return (whole and bool(batch.sequences)) or self.cfg.old_logprobs == "always"

    def compare(self, batch: TrainBatch) -> dict[str, float]:
        """Compare the policy with the engine and the reference. Returns metrics. Collective.

        Sets ``correction`` and updates the KL weight.
        """
        rows = OwnedRows(batch.rows, batch.lengths, self.merge)
        metrics = self._correct(batch, rows)
        if batch.ref_logprobs is not None:
            metrics |= {"kl/mean": _mean(self._kl(batch), batch, rows), "kl/coef": self.kl_controller.coef}
            self.kl_controller.update(metrics["kl/mean"])
        return metrics

    def _kl(self, batch: TrainBatch) -> Tensor:
        """Return the KL penalty [N] of the policy before the step's updates to the reference, both without top-k and top-p."""
        assert batch.ref_logprobs is not None
        cfg = self.cfg.kl
        return kl_penalty(
            _whole_logprobs(batch), batch.ref_logprobs, cfg.estimator, mask=batch.loss_mask, clip=cfg.clip
        )

    def _add_teacher(self, batch: TrainBatch, rows: OwnedRows) -> dict[str, float]:
        """Subtract the per-token KL of the policy to the teacher from the advantages. Returns metrics. Collective."""
        teacher = batch.fields[TEACHER_LOGPROBS]
        assert isinstance(teacher, Tensor) and batch.advantages is not None
        kl = reverse_kl(_whole_logprobs(batch), teacher, batch.loss_mask)
        batch.advantages = batch.advantages - self.teacher_coef * kl
        return {"teacher/kl": _mean(kl, batch, rows)}

    def _correct(self, batch: TrainBatch, rows: OwnedRows) -> dict[str, float]:
        """Correct the difference between engine and trainer distributions if configured. Returns its metrics in every case."""
        assert batch.old_logprobs is not None
        cfg, staleness = self.cfg.rollout_correction, None
        if batch.versions is not None:
            staleness = batch.policy_version - batch.versions
        factors, statistics = rollout_correction(
            batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, rows, cfg, staleness
        )
        batch.correction = factors if takes_part(cfg, batch.versions is not None) else None
        return {f"rollout/{name}": value for name, value in statistics.items()}

    def _advantages(self, batch: TrainBatch, rewards: Tensor, rows: OwnedRows) -> dict[str, float]:
        inputs = AdvantageInputs(
            rewards, batch.loss_mask, rows, batch.group_ids, batch.truncated, batch.old_values, batch.bootstrap_values
        )
        inputs.score_parts, inputs.baselines = batch.score_parts, batch.baselines
        inputs.fields = pick_fields(batch, self.estimate, f"algorithm.advantage={self.cfg.advantage}")
        outcome = self.estimate(inputs, self.cfg)
        batch.advantages, batch.returns = outcome.advantages, outcome.returns
        if batch.old_values is None or outcome.returns is None:
            return {}
        sums = explained_variance_sums(batch.old_values, outcome.returns, batch.loss_mask, rows)
        returns = _mean(outcome.returns, batch, rows)
        return {"critic/explained_variance": explained_variance(sums), "critic/returns": returns}


def _whole_logprobs(batch: TrainBatch) -> Tensor:
    """Return logprobs [N] of the policy before the step's updates, without top-k and top-p."""
    assert batch.old_logprobs is not None
    return batch.old_logprobs if batch.log_mass is None else batch.old_logprobs + batch.log_mass


def _mean(values: Tensor, batch: TrainBatch, rows: OwnedRows) -> float:
    """Return the mean over the sampled tokens of all rows."""
    return float(rows.sums(values, batch.loss_mask).sum() / batch.num_sampled.sum().clamp(min=1))
