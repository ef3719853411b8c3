"""Update a model by minibatches of the rows of a step.

An :class:`Objective` defines the training loss. A role (actor, critic, reward model) is a model plus an objective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import row_weights
from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.data.collate import RowTokens
from rlhf_mcore.mcore.model import LossSums, MegatronModel, Metrics
from rlhf_mcore.mcore.optimizer import StepOutcome, learning_rate
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.parallel.rows import owners_of
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.types import Field, Microbatch, RowSizes, TrainBatch, UpdateResult

Update = Callable[[], UpdateResult | None]


class Objective(ABC):
    """The loss of a model.

    By default it reads no fields, uses the aggregation's token weights, and rows are independent.
    """

    rows_per_unit: ClassVar[int] = 1  # number of consecutive rows of a batch that stay together in a microbatch
    # Sums with the minibatch's weights, like the loss: means over the minibatch
    weighted: ClassVar[tuple[str, ...]] = ()

    def fields(self, batch: TrainBatch) -> Mapping[str, Field]:
        """Return the batch fields that the loss reads: tensors [N, ...] and ragged fields.

        They are sent with the tokens.
        """
        return {}

    def weights(self, tokens: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """Return the token weights [N] of the loss, from the aggregation's weights.

        ``num_rows``: number of rows in the minibatch, on all ranks.
        """
        return weights

    @abstractmethod
    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Return a microbatch's loss, and detached sums over its trainable tokens.

        The loss is summed with ``microbatch.fields["weights"]``.
        """
        ...

    @abstractmethod
    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        """Convert the loss and sums over the step's updates to public metrics.

        ``num_tokens``: trainable tokens of these updates.
        """
        ...


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """The updates of a step: ``prompts_per_minibatch`` prompts each, ``epochs`` passes over all rows."""

    prompts_per_minibatch: int
    epochs: int = 1
    loss_aggregation: str = "token"
    constant_length: int | None = None


@dataclass(frozen=True, slots=True)
class MinibatchCounts:
    """Counts of a minibatch over all ranks: trainable tokens, rows, and all tokens of the rows."""

    sampled: int
    rows: int
    tokens: int


@dataclass(slots=True)
class UpdateSums:
    """Sums of an update over microbatches and data-parallel ranks, equal on every rank of the role."""

    loss: float
    metrics: dict[str, float]  # the objective's sums by name
    mtp: tuple[float, float] | None  # see ``LossSums``
    computed: float  # tokens that the model computed
    load_balance: float | None = None  # None: no load-balancing loss
    indexer_loss: float | None = None  # None: no indexers are trained
    own: dict[str, float] = field(default_factory=dict)  # metrics of the optimizer, averaged over updates


@dataclass(slots=True, kw_only=True)
class TrainedModel(RoleModel):
    """A model with an optimizer, updated by minibatches. ``name`` prefixes the metrics.

    ``trained``: Hugging Face names of the tensors that the optimizer updates; None: all.
    """

    optimizer: OptimizerConfig
    plan: MinibatchPlan
    name: str
    trained: Sequence[str] | None = None
    progress: Callable[[str], None] = lambda text: None  # shows the current update of the step
    num_updates: int = field(default=0, init=False)  # including skipped ones
    # Number of latest consecutive updates without a finite gradient.
    num_bad: int = field(default=0, init=False)

    def deliver_update(self, batch: TrainBatch, objective: Objective) -> Update:
        """Send the rows of a step to the ranks that learn from them. Collective over the world.

        Returns:
            A function that makes all updates of the step and returns its metrics, or None on ranks without the model.
            It is collective over the ranks of the model only, so models on different ranks learn at the same time.

        Metrics are means over the tokens or rows of all updates together. Metrics such as the gradient norm are means
        over updates.
        """
        parts = minibatches(batch.group_ids, self.plan.prompts_per_minibatch)
        fields: dict[str, Field] = {"loss_mask": batch.loss_mask, **objective.fields(batch)}
        deals = [self.deal(batch, part, objective.rows_per_unit) for part in parts]
        shares = self.deliver(batch, deals, fields)
        counts = [
            MinibatchCounts(int(batch.num_sampled[rows].sum()), len(rows), int(batch.lengths[rows].sum()))
            for rows in parts
        ]
        if self.model is None:
            return lambda: None
        weighted = [self._weigh(batch, objective, tokens, count) for tokens, count in zip(shares, counts, strict=True)]
        return partial(self._update_all, objective, weighted, counts)

    def makes_one_update(self, batch: TrainBatch) -> bool:
        """Return whether a step learns from these rows in one update."""
        return self.plan.epochs == 1 and len(minibatches(batch.group_ids, self.plan.prompts_per_minibatch)) == 1

    def choose_owners(self, sizes: RowSizes) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
        """Return the owners [B] of rows that this model learns from, and ``TrainBatch.replicas``.

        The ranks of a replica own nearly equal numbers of tokens.
        """
        parts = [self.balance(sizes, part) for part in minibatches(sizes.group_ids, self.plan.prompts_per_minibatch)]
        owners = torch.zeros_like(sizes.lengths)
        for replica, ranks in enumerate(self.layout.replicas):
            rows = [row for part in parts for row in part[replica]]
            owners[rows] = torch.tensor(ranks)[owners_of(sizes.lengths[rows].numpy(), len(ranks))]
        return owners, self.layout.replicas

    def _weigh(self, batch: TrainBatch, objective: Objective, tokens: RowTokens, counts: MinibatchCounts) -> RowTokens:
        """Replace the loss mask of rows by token weights."""
        sampled = batch.num_sampled[tokens.rows]
        aggregation, constant = self.plan.loss_aggregation, self.plan.constant_length
        per_row = row_weights(
            sampled, aggregation, num_tokens=counts.sampled, num_rows=counts.rows, constant_length=constant
        )
        fields = dict(tokens.fields)
        lengths = torch.tensor(tokens.lengths, dtype=torch.int64)
        weights = torch.where(fields.pop("loss_mask"), per_row.repeat_interleave(lengths), 0.0)
        fields["weights"] = objective.weights(tokens, weights, counts.rows)
        return replace(tokens, fields=fields)

    def _update_all(self, objective: Objective, parts: list[RowTokens], counts: list[MinibatchCounts]) -> UpdateResult:
        assert self.model is not None
        updates: list[UpdateSums] = []
        with self.model.updating():
            for tokens in parts * self.plan.epochs:
                self.progress(f"{self.name}, update {len(updates) + 1} of {len(parts) * self.plan.epochs}")
                updates.append(self._update(objective, tokens))
            self.model.gather_weights()
            is_finite = self._holds_everywhere(self.is_finite())
        own = {name: _mean([update.own[name] for update in updates]) for name in updates[0].own}
        own["bad_updates_in_a_row"] = float(self.num_bad)
        own |= {} if is_finite else {"not_finite": 1.0}
        if self.model.routing is not None:
            own |= self.model.routing.mismatch()
        metrics = self._merge_sums(objective, updates, counts * self.plan.epochs)
        metrics |= {f"{self.name}/{key}": value for key, value in own.items()}
        computed = sum(update.computed for update in updates)
        tokens_of_rows = sum(count.tokens for count in counts) * self.plan.epochs
        if computed < tokens_of_rows:
            metrics["trainer/computed_share"] = computed / tokens_of_rows
        return UpdateResult(self.name, metrics, own["grad_norm"], is_finite, self.num_bad)

    def _merge_sums(
        self, objective: Objective, updates: list[UpdateSums], counts: list[MinibatchCounts]
    ) -> dict[str, float]:
        """Merge the sums of all updates into metrics.

        Each loss is weighted by the number of tokens or rows that it averages.
        """
        by_tokens = self.plan.loss_aggregation == "token"
        shares = _normalize([count.sampled if by_tokens else count.rows for count in counts])
        loss = _sum_products(shares, [update.loss for update in updates])
        sums = {}
        for name in updates[0].metrics:
            factors = shares if name in objective.weighted else [1.0] * len(updates)
            sums[name] = _sum_products(factors, [update.metrics[name] for update in updates])
        metrics = objective.metrics(loss, sums, max(float(sum(count.sampled for count in counts)), 1.0))
        if mtp := [update.mtp for update in updates if update.mtp is not None]:
            metrics[f"{self.name}/mtp_loss"] = sum(nll for nll, _ in mtp) / max(sum(tokens for _, tokens in mtp), 1.0)
        if distances := [update.indexer_loss for update in updates if update.indexer_loss is not None]:
            by_all_tokens = _normalize([count.tokens for count in counts])
            metrics[f"{self.name}/indexer_loss"] = _sum_products(by_all_tokens, distances)
        if balances := [update.load_balance for update in updates if update.load_balance is not None]:
            by_all_tokens = _normalize([count.tokens for count in counts])
            metrics[f"{self.name}/load_balance"] = _sum_products(by_all_tokens, balances)
        return metrics

    def is_finite(self) -> bool:
        """Return whether the weights and the optimizer's state on this rank are all finite. Local."""
        return self.model is None or self.model.optimizer is None or self.model.optimizer.is_finite()

    def _update(self, objective: Objective, tokens: RowTokens) -> UpdateSums:
        """Make one update."""
        assert self.model is not None
        microbatches = self.microbatches(tokens, objective.rows_per_unit)
        sizes = [sum(m.lengths) if m.tree is None else int((m.tree.uses > 0).sum()) for m in microbatches]
        losses = self.model.forward_backward(microbatches, partial(objective.loss, self.model))
        sums = self._reduce(losses, float(sum(sizes)))
        lr = learning_rate(self.num_updates, self.optimizer.lr, self.optimizer.schedule)
        # The loss can be NaN on a single tensor-parallel rank, but all ranks of the role must skip the same updates.
        outcome = StepOutcome(False, math.nan, finite=False)
        if self._holds_everywhere(math.isfinite(sums.loss)):
            outcome = self.model.step(lr)
        self.num_updates += 1
        self.num_bad = 0 if outcome.finite else self.num_bad + 1
        if self.model.aux_loss_coef:
            sums.load_balance = self.model.load_balance()
        if self.model.indexer != "frozen":
            sums.indexer_loss = self.model.indexer_loss()
        sums.own = {"grad_norm": outcome.grad_norm, "lr": lr, "skipped_updates": float(not outcome.updated)}
        if self.model.mtp is not None and self.model.mtp.alone:
            sums.own["mtp_grad_norm"] = outcome.norm_alone
        if self.model.indexer == "sparse":
            sums.own["indexer_grad_norm"] = outcome.norm_alone
        return sums

    def _holds_everywhere(self, holds: bool) -> bool:
        """Return whether a condition holds on every rank of the role. Collective over them."""
        assert self.model is not None
        return reduce_sums({"not": float(not holds)}, self.model.groups.collection.intra_dist_opt)["not"] == 0.0

    def _reduce(self, parts: list[LossSums], computed: float) -> UpdateSums:
        """Sum the last stage's results over microbatches and data-parallel ranks, for every rank of the role.

        ``computed``: as in ``UpdateSums``, for this data-parallel rank.
        """
        assert self.model is not None
        groups = self.model.groups
        sums: dict[str, float] = {}
        if self.model.is_last_stage:
            names, has_mtp = list(parts[0].metrics), parts[0].mtp is not None
            columns = [[part.loss, *(part.mtp or ()), *(part.metrics[name] for name in names)] for part in parts]
            device = parts[0].loss.device
            totals = (sum(column) for column in zip(*columns, strict=True))
            values = [torch.as_tensor(total, dtype=torch.float64, device=device) for total in totals]
            # The prefix keeps names of metrics distinct from ours. Stacking the values means waiting for the device
            # only once.
            keys = [_LOSS, *(_MTP if has_mtp else ()), *(_METRIC + name for name in names)]
            own = dict(zip(keys, torch.stack(values).tolist(), strict=True))
            sums = reduce_sums(own | {_COMPUTED: computed}, groups.collection.dp)
        if groups.layout.pp > 1:
            sums = broadcast_json(sums, groups.layout.pp - 1, groups.collection.pp)
        mtp = (sums.pop(_MTP[0]), sums.pop(_MTP[1])) if _MTP[0] in sums else None
        loss, computed = sums.pop(_LOSS), sums.pop(_COMPUTED)
        named = {name.removeprefix(_METRIC): value for name, value in sums.items()}
        return UpdateSums(loss, named, mtp, computed)


# Names of an update's sums in the reduction.
_LOSS, _MTP, _COMPUTED, _METRIC = "loss", ("mtp_nll", "mtp_tokens"), "computed_tokens", "metric "


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sum_products(factors: Sequence[float], values: Sequence[float]) -> float:
    return sum(factor * value for factor, value in zip(factors, values, strict=True))


def _normalize(masses: Sequence[int]) -> list[float]:
    total = sum(masses)
    return [mass / total if total else 1.0 / len(masses) for mass in masses]


def minibatches(group_ids: Tensor, prompts_per_minibatch: int) -> list[list[int]]:
    """Return the rows of each minibatch, which are the rows of consecutive prompts.

    They do not depend on the layout.
    """
    numbers = torch.div(group_ids, prompts_per_minibatch, rounding_mode="floor")
    return [(numbers == number).nonzero().flatten().tolist() for number in numbers.unique().tolist()]
