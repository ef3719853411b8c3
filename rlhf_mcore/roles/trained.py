"""A model that is updated: minibatches, epochs, the optimizer and its schedule. What it is trained for is an objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import row_weights
from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.data.collate import RowTokens
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.optimizer import MegatronOptimizer, StepOutcome, learning_rate, optimizer_step
from rlhf_mcore.mcore.optimizer_state import state_is_finite
from rlhf_mcore.mcore.step import Metrics, forward_backward, load_balance
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.roles.role import RoleModel, minibatches
from rlhf_mcore.types import Microbatch, TrainBatch

Update = Callable[[], dict[str, float]]


class Objective(Protocol):
    """What a model is trained for."""

    @property
    def rows_per_unit(self) -> int:
        """So many consecutive rows of a batch stay together in a microbatch."""
        ...

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        """The tensors [N] of the batch that the loss looks at; they travel with the tokens."""
        ...

    def weights(self, held: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """Token weights [N] of the loss, from those of the aggregation. ``num_rows``: of the minibatch, over all ranks."""
        ...

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Loss of a microbatch, summed with ``microbatch.fields["weights"]``, and detached sums over its trainable tokens."""
        ...

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        """Sums over the minibatch under their public names."""
        ...


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """How a step's rows become updates: ``prompts_per_minibatch`` each, ``epochs`` times over all of them."""

    prompts_per_minibatch: int
    epochs: int = 1
    loss_aggregation: str = "token"
    constant_length: int | None = None


@dataclass(slots=True)
class TrainedModel(RoleModel):
    """A model with its optimizer. ``name`` prefixes the metrics."""

    optimizer: MegatronOptimizer | None
    optimizer_cfg: OptimizerConfig
    plan: MinibatchPlan
    name: str
    num_updates: int = field(default=0, kw_only=True)  # skipped ones count too
    # Updates in a row, the last one among them, without a finite gradient.
    num_bad: int = field(default=0, kw_only=True)

    def deliver_update(self, batch: TrainBatch, objective: Objective) -> Update:
        """Bring the rows of a step to the ranks that learn from them. Collective over the world.

        Returns:
            What makes all updates of the step. Collective over the ranks of the model alone, so that models on different ranks learn
            at the same time. It returns their mean metrics, nothing on ranks without the model. ``<name>/not_finite`` is among
            them when the updates have left a weight or a moment NaN or infinite on any rank.
        """
        parts = minibatches(batch, self.plan.prompts_per_minibatch)
        fields = {"loss_mask": batch.loss_mask, **objective.fields(batch)}
        held = self.deliver(batch, parts, fields, objective.rows_per_unit)
        counts = [(int(batch.num_sampled[rows].sum()), len(rows)) for rows in parts]
        if self.model is None:
            return dict
        weighted = [
            self._weighted(batch, objective, tokens, *count) for tokens, count in zip(held, counts, strict=True)
        ]
        num_tokens = [count for count, _ in counts]
        return partial(self._update_all, objective, weighted, num_tokens)

    def _weighted(
        self, batch: TrainBatch, objective: Objective, held: RowTokens, num_tokens: int, num_rows: int
    ) -> RowTokens:
        """The loss mask gives way to the weights of the tokens."""
        sampled = batch.num_sampled[held.rows]
        aggregation, constant = self.plan.loss_aggregation, self.plan.constant_length
        per_row = row_weights(sampled, aggregation, num_tokens=num_tokens, num_rows=num_rows, constant_length=constant)
        fields = dict(held.fields)
        lengths = torch.tensor(held.lengths, dtype=torch.int64)
        weights = torch.where(fields.pop("loss_mask"), per_row.repeat_interleave(lengths), 0.0)
        return RowTokens(held.rows, held.lengths, {**fields, "weights": objective.weights(held, weights, num_rows)})

    def _update_all(self, objective: Objective, parts: list[RowTokens], num_tokens: list[int]) -> dict[str, float]:
        history = [
            self._update(objective, held, count)
            for _ in range(self.plan.epochs)
            for held, count in zip(parts, num_tokens, strict=True)
        ]
        means = {name: sum(metrics[name] for metrics in history) / len(history) for name in history[0]}
        if not self._all_ranks(self.is_finite()):
            means[f"{self.name}/not_finite"] = 1.0
        return means | {f"{self.name}/bad_updates_in_a_row": float(self.num_bad)}

    def is_finite(self) -> bool:
        """Whether the weights and the optimizer's state on this rank hold no NaN and no infinity. Local."""
        return self.model is None or self.optimizer is None or state_is_finite(self.model, self.optimizer)

    def _update(self, objective: Objective, held: RowTokens, num_tokens: int) -> dict[str, float]:
        assert self.model is not None and self.optimizer is not None
        microbatches = self.microbatches(held, objective.rows_per_unit)
        metrics = forward_backward(self.model, microbatches, partial(objective.loss, self.model))
        sums = self._reduce(metrics)
        lr = learning_rate(self.num_updates, self.optimizer_cfg.lr, self.optimizer_cfg.schedule)
        # The loss may be NaN on one tensor-parallel rank alone; all ranks of the role have to skip the same updates.
        outcome = StepOutcome(False, math.nan, finite=False)
        if self._all_ranks(math.isfinite(sums["loss"])):
            outcome = optimizer_step(self.model, self.optimizer, lr)
        self.num_updates += 1
        self.num_bad = 0 if outcome.finite else self.num_bad + 1
        named = objective.named(sums, max(float(num_tokens), 1.0))
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
