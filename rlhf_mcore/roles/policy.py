"""The two policies of a run: the actor that is trained, and the frozen reference it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_mcore.algorithms.interfaces import LossInputs, PolicyLoss
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, token_weights, weighted_sum
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig
from rlhf_mcore.data.collate import make_microbatches, restore_rows, sequence_ids
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.optimizer import learning_rate, optimizer_step
from rlhf_mcore.mcore.step import Metrics, broadcast_from_last_stage, forward_backward, forward_logprobs, load_balance
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.types import Microbatch, TrainBatch

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer


@dataclass(slots=True)
class Policy:
    """A model that is asked for the logprobs of given tokens, at the sampling temperature."""

    model: MegatronModel
    trainer: TrainerConfig
    temperature: float

    def microbatches(self, batch: TrainBatch, rows: list[int], fields: Mapping[str, Tensor]) -> list[Microbatch]:
        """Rows as this model's layout wants them: cut by tokens, padded for sequence parallelism, counted for its pipeline.

        Where experts are spread over data-parallel ranks these exchange tokens in every layer, so all run equally many.
        """
        layout = self.model.groups.layout
        cut = partial(
            make_microbatches,
            batch,
            rows,
            fields=fields,
            max_tokens=self.trainer.max_tokens_per_microbatch,
            packing=self.trainer.packing,
            pad_multiple=layout.tp if layout.sequence_parallel else 1,
            multiple_of=layout.pp if layout.vpp else 1,
        )
        made = cut()
        if layout.ep == 1:
            return made
        most = int(reduce_sums({"count_max": float(len(made))}, self.model.groups.collection.dp)["count_max"])
        return made if len(made) == most else cut(min_count=most)

    def compute_logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropy [B, T] fp32 in token layout, zero where nothing is predicted. Collective over the model."""
        microbatches = self.microbatches(batch, list(range(len(batch.lengths))), {})
        outputs = forward_logprobs(self.model, microbatches, self.temperature)
        shape = tuple(batch.token_ids.shape)
        results = []
        for which in (0, 1):
            rows = (
                restore_rows([out[which] for out in outputs], microbatches, *shape)
                if self.model.is_last_stage
                else None
            )
            results.append(broadcast_from_last_stage(self.model, rows, shape))
        return results[0], results[1]


@dataclass(slots=True)
class Actor(Policy):
    """The policy being trained: a clipped policy-gradient loss over minibatches, several epochs if asked."""

    optimizer: MegatronOptimizer
    optimizer_cfg: OptimizerConfig
    algorithm: AlgorithmConfig
    num_updates: int = field(default=0)
    policy_loss: PolicyLoss = field(init=False)

    def __post_init__(self) -> None:
        self.policy_loss = find_policy_loss(self.algorithm.policy_loss)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """All updates of a step. Returns their mean metrics. Collective over the actor's ranks."""
        history = [
            self._update_minibatch(batch, (batch.minibatch_ids == number).nonzero().flatten().tolist())
            for _ in range(self.trainer.ppo_epochs)
            for number in range(batch.num_minibatches)
        ]
        return {name: sum(metrics[name] for metrics in history) / len(history) for name in history[0]}

    def _update_minibatch(self, batch: TrainBatch, rows: list[int]) -> dict[str, float]:
        mask = torch.zeros_like(batch.loss_mask)
        mask[rows] = batch.loss_mask[rows]
        counts = reduce_sums({"tokens": float(mask.sum()), "rows": float(len(rows))}, self.model.groups.collection.dp)
        weights = token_weights(
            mask,
            self.algorithm.loss_aggregation,
            num_tokens=int(counts["tokens"]),
            num_rows=int(counts["rows"]),
            constant_length=self.algorithm.constant_length,
        )
        microbatches = self.microbatches(batch, rows, self._fields(batch, weights))
        metrics = forward_backward(self.model, microbatches, self.temperature, self._loss)
        lr = learning_rate(self.num_updates, self.optimizer_cfg.lr, self.optimizer_cfg.schedule)
        updated, grad_norm = optimizer_step(self.model, self.optimizer, lr)
        self.num_updates += 1
        named = self._reduce(metrics, num_tokens=max(counts["tokens"], 1.0))
        if self.model.aux_loss_coef:
            named["loss/load_balance"] = load_balance(self.model)
        return {**named, "actor/grad_norm": grad_norm, "actor/lr": lr, "actor/skipped_updates": float(not updated)}

    def _fields(self, batch: TrainBatch, weights: Tensor) -> dict[str, Tensor]:
        assert batch.old_logprobs is not None and batch.advantages is not None
        fields = {"weights": weights, "old_logprobs": batch.old_logprobs, "advantages": batch.advantages}
        if batch.ref_logprobs is not None:
            fields["ref_logprobs"] = batch.ref_logprobs
        return fields

    def _loss(self, logprobs: Tensor, entropy: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Policy loss, minus the entropy bonus, plus the KL term where it sits in the loss. Weighted sums throughout."""
        fields = {name: value.to(logprobs.device) for name, value in microbatch.fields.items()}
        weights, cfg = fields["weights"], self.algorithm
        trainable = weights > 0
        ids, count = sequence_ids(microbatch)
        inputs = LossInputs(
            logprobs, fields["old_logprobs"], fields["advantages"], weights, ids.to(logprobs.device), count
        )
        policy, metrics = self.policy_loss(inputs, cfg)
        loss = policy
        metrics["policy"] = policy.detach().clone()
        metrics["entropy"] = masked_sum(entropy.detach(), trainable)
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * weighted_sum(entropy, weights)
        if cfg.kl.coef and cfg.kl.placement == "loss":
            kl = kl_penalty(logprobs, fields["ref_logprobs"], cfg.kl.estimator, mask=trainable)
            loss = loss + cfg.kl.coef * weighted_sum(kl, weights)
            metrics["kl"] = masked_sum(kl.detach(), trainable)
        return loss, metrics

    def _reduce(self, metrics: list[Metrics], num_tokens: float) -> dict[str, float]:
        """Sums over microbatches and data-parallel ranks, known to the last stage, under their public names on every rank."""
        groups = self.model.groups
        sums: dict[str, float] = {}
        if self.model.is_last_stage:
            local = {name: float(sum(m[name] for m in metrics)) for name in metrics[0]}
            sums = reduce_sums(local, groups.collection.dp)
        if groups.layout.pp > 1:
            sums = broadcast_json(sums, groups.last_stage_rank, groups.collection.pp)
        named = {"loss/total": sums.pop("loss"), "loss/policy": sums.pop("policy")}
        if "kl" in sums:
            named["loss/kl"] = sums.pop("kl") / num_tokens
        return named | {f"actor/{name}": value / num_tokens for name, value in sums.items()}
