"""The policies of a run: an actor, trained by reinforcement or by imitation, and the frozen reference it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from rlhf_mcore.algorithms.correction import RATIO_MODES, factors_of_microbatch
from rlhf_mcore.algorithms.interfaces import LossInputs, PolicyLoss
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.algorithms.supervised import perplexity, sft_loss
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.data.collate import sequence_ids
from rlhf_mcore.mcore.model import MegatronModel, Metrics
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.roles.model import Objective, RoleModel, TrainedModel, Update
from rlhf_mcore.types import Microbatch, TrainBatch


def logprobs_of(model: RoleModel, batch: TrainBatch, temperature: float) -> Tensor:
    """Logprobs [N] fp32 of the tokens in the loss mask at a sampling temperature, zero elsewhere. Collective over the world."""

    def logprobs(outputs: Tensor, microbatch: Microbatch) -> Tensor:
        assert model.model is not None
        return model.model.logprobs_and_entropy(outputs, microbatch, temperature, with_entropy=False)[0]

    return model.per_token(batch, logprobs, {"loss_mask": batch.loss_mask})


@dataclass(slots=True)
class Reference:
    """The frozen policy. It has the actor's layout, so it can be brought up to date rank by rank."""

    model: RoleModel
    temperature: float

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] fp32 of the sampled tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, self.temperature)

    def refresh(self, actor: Actor) -> None:
        """Copy the actor's weights."""
        mine, new = self.model.model, actor.model.model
        if mine is None or new is None:
            return
        with new.movable.use(WEIGHTS), mine.movable.use(WEIGHTS, writes=True):
            sources = {source.name: source.tensor for source in new.local_parameters()}  # MTP layers may be beside them
            for parameter in mine.local_parameters():
                parameter.tensor.copy_(sources[parameter.name])


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """A policy-gradient loss with the rollout correction, minus the entropy bonus, plus the KL term where it is in the loss."""

    losses: ClassVar[tuple[str, ...]] = ("loss", "policy")

    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss
    temperature: float
    kl_coef: float = 0.0
    with_entropy: bool = True  # whether it is a metric; a bonus needs it in any case
    # Logprobs of the update's forward pass, where they are the old ones too, and the microbatches that they are of.
    kept: list[tuple[Tensor, Microbatch]] = field(default_factory=list)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.advantages is not None
        optional = {
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs,
            "correction": batch.correction,
        }
        if batch.old_logprobs is None and self.algorithm.rollout_correction.mode in RATIO_MODES:
            optional["rollout_logprobs"] = batch.rollout_logprobs
        return {"advantages": batch.advantages} | {name: value for name, value in optional.items() if value is not None}

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Weighted sums throughout. Without ``old_logprobs`` the policy before the update is the present one: every ratio is 1."""
        logprobs, entropy = model.logprobs_and_entropy(
            outputs, microbatch, self.temperature, with_entropy=self.with_entropy or bool(self.algorithm.entropy_coef)
        )
        fields = {name: value.to(logprobs.device) for name, value in microbatch.fields.items()}
        weights, cfg = fields["weights"], self.algorithm
        trainable = weights > 0
        ids, count = sequence_ids(microbatch)
        ids = ids.to(logprobs.device)
        old = fields.get("old_logprobs")
        if old is None:
            old = logprobs.detach()
            self.kept.append((old, microbatch))
        corrected = weights * fields["correction"] if "correction" in fields else weights
        if "rollout_logprobs" in fields:
            corrected = corrected * factors_of_microbatch(
                old, fields["rollout_logprobs"], trainable, ids, count, cfg.rollout_correction
            )
        inputs = LossInputs(
            logprobs,
            old,
            fields["advantages"],
            mask=trainable,
            weights=corrected,
            sequence_ids=ids,
            num_sequences=count,
        )
        policy, metrics = self.policy_loss(inputs, cfg)
        loss = policy
        metrics["policy"] = policy.detach().clone()
        if entropy is not None:
            metrics["entropy"] = masked_sum(entropy.detach(), trainable)
        if cfg.entropy_coef:
            assert entropy is not None
            loss = loss - cfg.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_coef:
            kl = kl_penalty(logprobs, fields["ref_logprobs"], cfg.kl.estimator, mask=trainable, clip=cfg.kl.clip)
            loss = loss + self.kl_coef * weighted_sum(kl, weights)
            metrics["kl"] = masked_sum(kl.detach(), trainable)
        return loss, metrics

    def metrics(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        named = {"loss/total": sums.pop("loss"), "loss/policy": sums.pop("policy")}
        if "kl" in sums:
            named["loss/kl"] = sums.pop("kl") / num_tokens
        return named | {f"actor/{name}": value / num_tokens for name, value in sums.items()}


@dataclass(slots=True)
class Actor:
    """The policy being trained."""

    model: TrainedModel
    temperature: float
    algorithm: AlgorithmConfig
    _objective: PolicyObjective = field(init=False)

    def __post_init__(self) -> None:
        policy_loss = find_policy_loss(self.algorithm.policy_loss)
        self._objective = PolicyObjective(self.algorithm, policy_loss, self.temperature)

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] fp32 of the sampled tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, self.temperature)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """All updates of a step, with the step's weight of the KL. See :meth:`TrainedModel.deliver_update`."""
        self._objective = replace(self._objective, kl_coef=batch.kl_coef, with_entropy=batch.with_entropy, kept=[])
        return self.model.deliver_update(batch, self._objective)

    def makes_one_update(self, batch: TrainBatch) -> bool:
        """Whether a step learns from these rows in one update."""
        return self.model.makes_one_update(batch)

    def logprobs_of_update(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] fp32 of the forward pass of the update of these rows, as ``compute_logprobs``. Collective over the world."""
        kept = self._objective.kept
        found = self.model.tokens_of_update(batch, [values for values, _ in kept], [held for _, held in kept])
        kept.clear()
        return found


@dataclass(frozen=True, slots=True)
class ImitationObjective(Objective):
    """Negative log-likelihood of the responses."""

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        logprobs, _ = model.logprobs_and_entropy(outputs, microbatch, temperature=1.0, with_entropy=False)
        return sft_loss(logprobs, microbatch.fields["weights"].to(logprobs.device))

    def metrics(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/sft": sums["loss"], "actor/perplexity": perplexity(sums["nll"] / num_tokens)}


@dataclass(slots=True)
class SupervisedActor:
    """A policy that learns to give the responses of the data."""

    model: TrainedModel

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, temperature=1.0)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """One update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, ImitationObjective())
