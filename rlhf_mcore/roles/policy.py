"""The two policies of a run: the actor that is trained, and the frozen reference it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlhf_mcore.algorithms.interfaces import LossInputs, PolicyLoss
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.data.collate import sequence_ids
from rlhf_mcore.mcore.model import local_parameters
from rlhf_mcore.mcore.step import Metrics, policy_head
from rlhf_mcore.roles.role import Role
from rlhf_mcore.roles.trained import TrainedRole
from rlhf_mcore.types import Microbatch, TrainBatch


def logprobs_of(role: Role, batch: TrainBatch, temperature: float) -> Tensor:
    def head(outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, ...]:
        assert role.model is not None
        return policy_head(role.model, temperature, outputs, microbatch)

    return role.per_token(batch, head)


@dataclass(slots=True)
class Policy(Role):
    """A model that is asked for the logprobs of given tokens, at the sampling temperature."""

    temperature: float

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [B, T] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self, batch, self.temperature)


@dataclass(slots=True)
class Reference(Policy):
    """The frozen policy. It lies as the actor lies, so it can be brought up to date rank by rank."""

    def refresh(self, actor: Role) -> None:
        """Take over the actor's weights."""
        if self.model is None or actor.model is None:
            return
        with self._on_device():
            for mine, new in zip(local_parameters(self.model), local_parameters(actor.model), strict=True):
                assert mine.name == new.name, (mine.name, new.name)
                mine.tensor.copy_(new.tensor)
            if self.host_weights is not None:
                self.host_weights.store()


@dataclass(slots=True)
class Actor(TrainedRole):
    """The policy being trained: a policy-gradient loss, the entropy bonus, and the KL term where it sits in the loss."""

    temperature: float
    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss = field(init=False)
    kl_coef: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.policy_loss = find_policy_loss(self.algorithm.policy_loss)

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [B, T] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self, batch, self.temperature)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """All updates of a step, with the step's weight of the KL."""
        self.kl_coef = batch.kl_coef
        return TrainedRole.update(self, batch)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.old_logprobs is not None and batch.advantages is not None
        optional = {"ref_logprobs": batch.ref_logprobs, "correction": batch.correction}
        fields = {"old_logprobs": batch.old_logprobs, "advantages": batch.advantages}
        return fields | {name: value for name, value in optional.items() if value is not None}

    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Policy loss with the rollout correction, minus the entropy bonus, plus the KL term. Weighted sums throughout."""
        assert self.model is not None
        logprobs, entropy = policy_head(self.model, self.temperature, outputs, microbatch)
        fields = {name: value.to(logprobs.device) for name, value in microbatch.fields.items()}
        weights, cfg = fields["weights"], self.algorithm
        trainable = weights > 0
        ids, count = sequence_ids(microbatch)
        corrected = weights * fields["correction"] if "correction" in fields else weights
        inputs = LossInputs(
            logprobs,
            fields["old_logprobs"],
            fields["advantages"],
            mask=trainable,
            weights=corrected,
            sequence_ids=ids.to(logprobs.device),
            num_sequences=count,
        )
        policy, metrics = self.policy_loss(inputs, cfg)
        loss = policy
        metrics["policy"] = policy.detach().clone()
        metrics["entropy"] = masked_sum(entropy.detach(), trainable)
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * weighted_sum(entropy, weights)
        if self.kl_coef:
            kl = kl_penalty(logprobs, fields["ref_logprobs"], cfg.kl.estimator, mask=trainable, clip=cfg.kl.clip)
            loss = loss + self.kl_coef * weighted_sum(kl, weights)
            metrics["kl"] = masked_sum(kl.detach(), trainable)
        return loss, metrics

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        named = {"loss/total": sums.pop("loss"), "loss/policy": sums.pop("policy")}
        if "kl" in sums:
            named["loss/kl"] = sums.pop("kl") / num_tokens
        return named | {f"actor/{name}": value / num_tokens for name, value in sums.items()}
