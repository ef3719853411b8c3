"""A role whose model is updated: minibatches, epochs, the optimizer and its schedule."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import token_weights
from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.mcore.optimizer import MegatronOptimizer, StepOutcome, learning_rate, optimizer_step
from rlhf_mcore.mcore.optimizer_state import state_is_finite
from rlhf_mcore.mcore.step import Metrics, forward_backward, load_balance
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.roles.role import Role, minibatches
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(frozen=True, slots=True)
class Updates:
    """How a step's rows become updates: ``prompts_per_minibatch`` each, ``epochs`` times over all of them."""

    prompts_per_minibatch: int
    epochs: int = 1
    loss_aggregation: str = "token"
    constant_length: int | None = None


@dataclass(slots=True)
class TrainedRole(Role):
    """Subclasses say the loss and which fields of the batch it needs; ``name`` prefixes the metrics."""

    optimizer: MegatronOptimizer | None
    optimizer_cfg: OptimizerConfig
    updates: Updates
    name: str
    num_updates: int = field(default=0, kw_only=True)  # skipped ones count too
    num_bad: int = field(
        default=0, kw_only=True
    )  # updates in a row, the last one among them, without a finite gradient

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """All updates of a step. Returns their mean metrics, nothing on ranks without the model. Collective over the role's ranks.

        ``<name>/not_finite`` is among them when the updates have left a weight or a moment NaN or infinite on any rank.
        """
        if self.model is None:
            return {}
        parts = minibatches(batch, self.updates.prompts_per_minibatch)
        history = [self._update(batch, rows) for _ in range(self.updates.epochs) for rows in parts]
        means = {name: sum(metrics[name] for metrics in history) / len(history) for name in history[0]}
        if not self._all_ranks(self.is_finite()):
            means[f"{self.name}/not_finite"] = 1.0
        return means | {f"{self.name}/bad_updates_in_a_row": float(self.num_bad)}

    def is_finite(self) -> bool:
        """Whether the weights and the optimizer's state on this rank hold no NaN and no infinity. Local."""
        return self.model is None or self.optimizer is None or state_is_finite(self.model, self.optimizer)

    def reweigh(self, batch: TrainBatch, weights: Tensor) -> Tensor:
        """Token weights [B, T] of the loss, from those of the aggregation."""
        return weights

    @abstractmethod
    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        """Tensors [B, T] that the loss looks at."""

    @abstractmethod
    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Loss of a microbatch, summed with ``microbatch.fields["weights"]``, and detached sums over its trainable tokens."""

    @abstractmethod
    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        """Sums over the minibatch under their public names."""

    def _update(self, batch: TrainBatch, rows: Sequence[int]) -> dict[str, float]:
        assert self.model is not None and self.optimizer is not None
        mask = torch.zeros_like(batch.loss_mask)
        mask[rows] = batch.loss_mask[rows]
        num_tokens = int(mask.sum())
        weights = token_weights(
            mask,
            self.updates.loss_aggregation,
            num_tokens=num_tokens,
            num_rows=len(rows),
            constant_length=self.updates.constant_length,
        )
        microbatches = self.microbatches(batch, rows, {"weights": self.reweigh(batch, weights), **self.fields(batch)})
        metrics = forward_backward(self.model, microbatches, self.loss)
        sums = self._reduce(metrics)
        lr = learning_rate(self.num_updates, self.optimizer_cfg.lr, self.optimizer_cfg.schedule)
        # The loss may be NaN on one tensor-parallel rank alone; all ranks of the role have to skip the same updates.
        outcome = StepOutcome(False, math.nan, finite=False)
        if self._all_ranks(math.isfinite(sums["loss"])):
            outcome = optimizer_step(self.model, self.optimizer, lr)
        self.num_updates += 1
        self.num_bad = 0 if outcome.finite else self.num_bad + 1
        named = self.named(sums, max(float(num_tokens), 1.0))
        if self.model.aux_loss_coef:
            named[f"{self.name}/load_balance"] = load_balance(self.model)
        optimizer = {"grad_norm": outcome.grad_norm, "lr": lr, "skipped_updates": float(not outcome.updated)}
        return named | {f"{self.name}/{key}": value for key, value in optimizer.items()}

    def _all_ranks(self, holds: bool) -> bool:
        """Whether it holds on every rank of the role. Collective over them."""
        assert self.model is not None
        return reduce_sums({"not": float(not holds)}, self.model.groups.collection.intra_dist_opt)["not"] == 0.0

    def _reduce(self, metrics: list[Metrics]) -> dict[str, float]:
        """Sums over microbatches and data-parallel ranks, known to the last stage, on every rank of the role."""
        assert self.model is not None
        groups = self.model.groups
        sums: dict[str, float] = {}
        if self.model.is_last_stage:
            local = {name: float(sum(m[name] for m in metrics)) for name in metrics[0]}
            sums = reduce_sums(local, groups.collection.dp)
        if groups.layout.pp > 1:
            sums = broadcast_json(sums, groups.last_stage_rank, groups.collection.pp)
        return sums
