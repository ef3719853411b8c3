"""Run and update a model over the rows of a step. The model has its own layout, on some or all ranks of the world.

An :class:`Objective` defines the training loss. A role (actor, critic, reward model) is a model plus an objective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.algorithms.masking import row_weights
from rlhf_mcore.config.questions import FP8_TOKENS
from rlhf_mcore.config.schema import OptimizerConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens, in_units, make_microbatches, restore_last, restore_tokens
from rlhf_mcore.data.prefixes import Bundle, deal_bundles, rows_with_other_routes
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.mcore.model import LossSums, MegatronModel, Metrics, OutputFunction
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.mcore.optimizer import StepOutcome, learning_rate
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.parallel.rows import NO_ROWS, Rows, merge_rows, move_fields, move_rows, rows_by_rank, split_tokens
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.types import ROUTES, Field, Microbatch, Ragged, RowSizes, TrainBatch, UpdateResult

Update = Callable[[], UpdateResult | None]
Deal = list[list[int]]  # the rows of each data-parallel rank


@dataclass(slots=True)
class RoleModel:
    """A model, and methods that run it over the rows of a step.

    ``model`` is None on ranks outside the layout. These ranks call the same methods, because they own rows too.
    """

    layout: ParallelLayout
    model: MegatronModel | None
    spec: ModelSpec
    trainer: TrainerConfig
    flops: ModelFlops | None = None  # None: balance data-parallel ranks by tokens only
    adapter: AdapterSizes | None = None  # sizes of the trained adapters, if any
    unshared_because: str | None = None  # why the model cannot share prefixes; None: it can

    @property
    def adapter_geometry(self) -> ModelGeometry | None:
        """Return the geometry of the adapters, or None without adapters."""
        return None if self.adapter is None else replace(self.spec.geometry, adapter=self.adapter)

    @property
    def trained_geometry(self) -> ModelGeometry:
        """Return the geometry of the tensors that an optimizer updates: the adapters, or the model."""
        return self.adapter_geometry or self.spec.geometry

    @property
    def shares_prefixes(self) -> bool:
        """Return whether shared prefixes of sequences are computed once. Equal on every rank of the world."""
        return self.trainer.share_prefixes and self.trainer.packing and self.unshared_because is None

    def adapter_parameters(self) -> list[LocalParameter]:
        """Return this rank's parameters of the adapters and of a scalar head. Without adapters: []."""
        return self.model.adapter_parameters() if self.model is not None else []

    def adapters_off(self) -> AbstractContextManager[None]:
        """Run the model without its adapters within this block."""
        return self.model.adapters_off() if self.model is not None else nullcontext()

    def local_parameters(self) -> list[LocalParameter]:
        """Return this rank's parameters of the model."""
        return self.model.local_parameters() if self.model is not None else []

    def on_device(self) -> AbstractContextManager[None]:
        """Keep the weights on the device within this block, in addition to the parts that are already there."""
        return self.model.movable.use(WEIGHTS, beside=True) if self.model is not None else nullcontext()

    @property
    def output_ranks(self) -> tuple[int, ...]:
        """The rank that returns the outputs of each data-parallel rank: the first one of its last pipeline stage."""
        return tuple(self.layout.rank_of(dp=replica, pp=self.layout.pp - 1) for replica in range(self.layout.dp))

    @property
    def keeps_outputs(self) -> bool:
        """Return whether this rank returns the outputs of its data-parallel rank."""
        return self.model is not None and dist.get_rank() in self.output_ranks

    def deal(self, batch: TrainBatch, rows: Sequence[int] | None = None, rows_per_unit: int = 1) -> Deal:
        """Distribute rows over the data-parallel ranks. Equal on every rank of the world.

        If the owners of the rows are the output ranks of this model, a rank runs the rows that it owns. Otherwise, see
        ``balance``.

        Args:
            batch: the rows of the step.
            rows: the rows to distribute; None: all rows.
            rows_per_unit: number of consecutive rows that stay together.
        """
        rows = range(batch.num_rows) if rows is None else rows
        if batch.owner_of_replica != self.output_ranks:
            return self.balance(batch.sizes, rows, rows_per_unit)
        assert rows_per_unit == 1, "units require owners on all ranks"
        owned: dict[int, list[int]] = {rank: [] for rank in self.output_ranks}
        owners = batch.owners.tolist()
        for row in rows:
            owned[owners[row]].append(row)
        return list(owned.values())

    def balance(self, sizes: RowSizes, rows: Sequence[int], rows_per_unit: int = 1) -> Deal:
        """Distribute rows in ascending order over the data-parallel ranks, with balanced costs.

        Rows of a group with a shared prefix go to one rank, or to several if that lowers the maximum cost per rank.
        """
        if sizes.computed is None or self.layout.dp == 1 or not self.shares_prefixes:
            computed, shared = sizes.lengths, torch.zeros_like(sizes.lengths)
        else:
            computed, shared = sizes.computed.unbind(1)
        whole, spared, groups = self._costs(computed), self._costs(shared), sizes.group_ids.tolist()
        bundles: list[Bundle] = []
        for unit in in_units(rows, rows_per_unit):
            group, own = groups[unit[0]], sum(whole[row] for row in unit) - sum(spared[row] for row in unit[1:])
            if bundles and bundles[-1].group == group and spared[unit[0]]:
                bundles[-1].units.append((own, unit))
            else:
                bundles.append(Bundle(group, spared[unit[0]], [(own, unit)]))
        shares = deal_bundles(bundles, self.layout.dp)
        return [sorted(row for bundle in share for _, unit in bundle.units for row in unit) for share in shares]

    def _costs(self, lengths: Tensor) -> list[float]:
        """Return the costs of rows with these lengths, in units of a token without attention."""
        costs = lengths.double()
        if self.flops is not None:
            costs = costs + self.flops.attention(costs) / (self.flops.token + self.flops.logits)
        return costs.tolist()

    def deliver(self, batch: TrainBatch, deals: Sequence[Deal], fields: Mapping[str, Field]) -> list[RowTokens]:
        """Send rows from their owners to the data-parallel ranks that run them. Collective over the world.

        Args:
            batch: the rows of the step.
            deals: rows that run together, by data-parallel rank.
            fields: fields of the batch to send with the tokens: tensors [N, ...] and ragged fields.

        Returns:
            This rank's share of each deal; [] on ranks without the model.
        """
        lengths = batch.lengths.numpy()
        by_replica = [np.array([r for deal in deals for r in deal[dp]], np.int64) for dp in range(self.layout.dp)]
        wanted: list[Rows] = [NO_ROWS] * dist.get_world_size()
        for rank in self.layout.ranks:
            wanted[rank] = by_replica[self.layout.coordinates(rank)["dp"]]
        moved = move_fields({"token_ids": batch.token_ids, **fields}, lengths, batch.owners.numpy(), wanted)
        if self.model is None:
            return []
        if self.model.vision is not None:
            self.model.vision.kept.begin(batch.token_ids)
        replica = self.layout.coordinates(dist.get_rank())["dp"]
        own = [deal[replica] for deal in deals]
        row_lengths = [lengths[rows].tolist() for rows in own]
        sizes = [sum(of_deal) for of_deal in row_lengths]
        tensors = {name: field.split(sizes) for name, field in moved.items() if isinstance(field, Tensor)}
        ragged = {name: split_tokens(field, sizes) for name, field in moved.items() if isinstance(field, Ragged)}
        return [
            RowTokens(
                rows,
                row_lengths[number],
                {name: parts[number] for name, parts in tensors.items()},
                {name: parts[number] for name, parts in ragged.items()},
                batch.sequences_of(rows) if batch.sequences else None,
                batch.images_of(rows),
            )
            for number, rows in enumerate(own)
        ]

    def microbatches(
        self, tokens: RowTokens, rows_per_unit: int = 1, *, forward_only: bool = False
    ) -> list[Microbatch]:
        """Split this rank's rows into microbatches, which are padded for its layout and limited in tokens.

        If tensor-parallel communication overlaps computation, all are padded to the limit, even without a backward
        pass. For an interleaved pipeline, their number is a multiple of the pipeline size. Data-parallel ranks with
        sharded experts exchange tokens in every layer, so they all run the same number of microbatches.
        """
        assert self.model is not None
        limit, multiple = self.trainer.max_tokens_per_microbatch, self.layout.token_multiple
        multiple *= FP8_TOKENS if self.model.overrides.wants("fp8") else 1
        if self.model.overrides.needs_one_shape:
            limit = multiple = limit // multiple * multiple
        elif forward_only:
            limit = self.trainer.forward_tokens or 2 * limit
        shares = self.shares_prefixes and self.model.vision is None
        split = partial(
            make_microbatches,
            tokens,
            rows_per_unit=rows_per_unit,
            max_tokens=limit,
            packing=self.trainer.packing,
            pad_multiple=multiple,
            sequence_multiple=self.layout.sequence_multiple,
            multiple_of=self.layout.pp if self.layout.vpp else 1,
            share_prefixes=shares,
            alone=self._routed_otherwise(tokens, learns=not forward_only) if shares else (),
        )
        microbatches = split()
        if self.layout.ep == 1:
            return microbatches
        group = self.model.groups.collection.dp
        most = int(reduce_sums({"count_max": float(len(microbatches))}, group)["count_max"])
        return microbatches if len(microbatches) == most else split(min_count=most)

    def _routed_otherwise(self, tokens: RowTokens, *, learns: bool) -> set[int]:
        """Return the sequences whose prefix the engine routed to other experts than in other sequences.

        They share nothing.
        """
        if ROUTES not in tokens.fields:
            return set()
        assert self.model is not None and self.model.routing is not None
        ids, routes = (
            [part.numpy() for part in tokens.fields[name].split(tokens.sequence_lengths)]
            for name in ("token_ids", ROUTES)
        )
        found = rows_with_other_routes([x.astype(np.int64) for x in ids], routes)
        self.model.routing.num_unshared += len(found) * learns
        return found

    def per_token(
        self,
        batch: TrainBatch,
        function: OutputFunction,
        fields: Mapping[str, Field] | None = None,
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Return ``function``'s result for each token in the loss mask: [N, *shape] fp32, zero elsewhere.

        The result for a token is at the position of its predictor. ``fields``: fields of the batch that ``function``
        reads from the microbatches, as in ``deliver``. ``shape``: shape of the result for one token. Collective over
        the world.
        """
        deal, _, tokens = self._run(batch, function, fields, shape)
        return self.to_owners(batch, deal, tokens)

    def per_row(self, batch: TrainBatch, function: OutputFunction) -> Tensor:
        """Return the result of ``function`` at the last token of each row: [B] fp32 on every rank.

        Collective over the world.
        """
        _, last, _ = self._run(batch, function)
        return merge_rows(last)

    def per_token_and_row(self, batch: TrainBatch, function: OutputFunction) -> tuple[Tensor, Tensor]:
        """Return the results of ``per_token`` and ``per_row`` from one run of the model."""
        deal, last, tokens = self._run(batch, function)
        return self.to_owners(batch, deal, tokens), merge_rows(last)

    def to_owners(self, batch: TrainBatch, deal: Deal, tokens: Tensor) -> Tensor:
        """Send values of tokens in the loss mask to the owners of the rows: [N, ...] fp32, zero elsewhere.

        Collective over the world. ``tokens``: as in ``all_to_owners``.
        """
        values = self.all_to_owners(batch, deal, tokens)
        return torch.where(batch.loss_mask.view(-1, *(1 for _ in values.shape[1:])), values, 0.0)

    def all_to_owners(self, batch: TrainBatch, deal: Deal, tokens: Tensor) -> Tensor:
        """Send values of all tokens to the owners of the rows: [N, ...]. Collective over the world.

        ``tokens``: values of the rows that ran on this output rank, back to back. Other ranks pass no values.
        """
        holders = np.zeros(batch.num_rows, np.int64)
        for rank, rows in zip(self.output_ranks, deal, strict=True):
            holders[rows] = rank
        owned = rows_by_rank(batch.owners.numpy(), dist.get_world_size())
        return move_rows({"values": tokens}, batch.lengths.numpy(), holders, owned)["values"]

    def own_lengths(self, batch: TrainBatch, deal: Deal) -> list[int]:
        """Return the lengths of the sequences that this rank runs."""
        rows = deal[self.layout.coordinates(dist.get_rank())["dp"]]
        return [size for sizes in batch.sequences_of(rows) for size in sizes]

    def _run(
        self,
        batch: TrainBatch,
        function: OutputFunction,
        fields: Mapping[str, Field] | None = None,
        shape: tuple[int, ...] = (),
    ) -> tuple[Deal, Tensor, Tensor]:
        """Run all rows. Return their deal, and the outputs at the last tokens [B, *shape] and at all tokens of own rows."""
        deal = self.deal(batch)
        parts = self.deliver(batch, [deal], fields or {})
        last, tokens = torch.zeros(batch.num_rows, *shape), torch.zeros(0, *shape)
        if self.model is not None:
            microbatches = self.microbatches(parts[0], forward_only=True)
            outputs = self.model.forward(microbatches, function)
            if self.keeps_outputs:
                rows, lengths = parts[0].rows, parts[0].sequence_lengths
                tokens = restore_tokens(outputs, microbatches, lengths)
                ends = [*accumulate(map(len, parts[0].sequences or [[0]] * len(rows)))]
                last[rows] = restore_last(outputs, microbatches, len(lengths))[[end - 1 for end in ends]]
        return deal, last, tokens


class Objective(ABC):
    """The loss of a model.

    By default it reads no fields, uses the aggregation's token weights, and rows are independent.
    """

    rows_per_unit: ClassVar[int] = 1  # number of consecutive rows of a batch that stay together in a microbatch
    weighted: ClassVar[
        tuple[str, ...]
    ] = ()  # sums with the minibatch's weights, like the loss: means over the minibatch

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
    mtp: tuple[float, float] | None = None  # see ``LossSums``
    load_balance: float | None = None  # None: no load-balancing loss
    grad_norm: float = math.nan
    mtp_grad_norm: float | None = None  # None: included in ``grad_norm``
    computed: tuple[float, float] = (0.0, 0.0)  # tokens that the model computed, and tokens of the rows
    lr: float = 0.0
    is_skipped: bool = False


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

    def choose_owners(self, sizes: RowSizes) -> tuple[Tensor, tuple[int, ...]]:
        """Return the owners [B] of rows that this model learns from, and ``TrainBatch.owner_of_replica``."""
        owners = torch.zeros_like(sizes.lengths)
        for part in minibatches(sizes.group_ids, self.plan.prompts_per_minibatch):
            for rank, rows in zip(self.output_ranks, self.balance(sizes, part), strict=True):
                owners[rows] = rank
        return owners, self.output_ranks

    def tokens_of_update(
        self,
        batch: TrainBatch,
        outputs: Sequence[Tensor],
        microbatches: Sequence[Microbatch],
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """Return outputs that the loss stored in the only update of a step, in the form of ``per_token``.

        Collective over the world.
        """
        deal, tokens = self.deal(batch), torch.zeros(0, *shape)
        if self.keeps_outputs:
            tokens = restore_tokens(outputs, microbatches, self.own_lengths(batch, deal))
        return self.to_owners(batch, deal, tokens)

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
        grad_norm = _mean([update.grad_norm for update in updates])
        own = {
            "grad_norm": grad_norm,
            "lr": _mean([update.lr for update in updates]),
            "skipped_updates": _mean([float(update.is_skipped) for update in updates]),
            "bad_updates_in_a_row": float(self.num_bad),
        }
        own |= {} if is_finite else {"not_finite": 1.0}
        if norms := [update.mtp_grad_norm for update in updates if update.mtp_grad_norm is not None]:
            own["mtp_grad_norm"] = _mean(norms)
        metrics = self._merge_sums(objective, updates, counts * self.plan.epochs)
        if self.model.routing is not None:
            own |= self.model.routing.mismatch()
        metrics |= {f"{self.name}/{key}": value for key, value in own.items()}
        computed, of_rows = (sum(update.computed[k] for update in updates) for k in (0, 1))
        if computed < of_rows:
            metrics["trainer/computed_share"] = computed / of_rows
        return UpdateResult(self.name, metrics, grad_norm, is_finite, self.num_bad)

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
        computed = float(sum(sizes)), float(sum(tokens.lengths))
        sums = self._reduce(self.model.forward_backward(microbatches, partial(objective.loss, self.model)), computed)
        sums.lr = learning_rate(self.num_updates, self.optimizer.lr, self.optimizer.schedule)
        # The loss can be NaN on a single tensor-parallel rank, but all ranks of the role must skip the same updates.
        outcome = StepOutcome(False, math.nan, finite=False)
        if self._holds_everywhere(math.isfinite(sums.loss)):
            outcome = self.model.step(sums.lr)
        self.num_updates += 1
        self.num_bad = 0 if outcome.finite else self.num_bad + 1
        if self.model.aux_loss_coef:
            sums.load_balance = self.model.load_balance()
        sums.grad_norm, sums.is_skipped = outcome.grad_norm, not outcome.updated
        if self.model.mtp is not None and self.model.mtp.alone:
            sums.mtp_grad_norm = outcome.norm_alone
        return sums

    def _holds_everywhere(self, holds: bool) -> bool:
        """Return whether a condition holds on every rank of the role. Collective over them."""
        assert self.model is not None
        return reduce_sums({"not": float(not holds)}, self.model.groups.collection.intra_dist_opt)["not"] == 0.0

    def _reduce(self, parts: list[LossSums], computed: tuple[float, float]) -> UpdateSums:
        """Sum the last stage's results over microbatches and data-parallel ranks.

        Return the sums on every rank of the role.

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
            own = dict(zip(keys, torch.stack(values).tolist(), strict=True)) | dict(
                zip(_COMPUTED, computed, strict=True)
            )
            sums = reduce_sums(own, groups.collection.dp)
        if groups.layout.pp > 1:
            sums = broadcast_json(sums, groups.layout.pp - 1, groups.collection.pp)
        mtp = (sums.pop(_MTP[0]), sums.pop(_MTP[1])) if _MTP[0] in sums else None
        loss, ran = sums.pop(_LOSS), (sums.pop(_COMPUTED[0]), sums.pop(_COMPUTED[1]))
        named = {name.removeprefix(_METRIC): value for name, value in sums.items()}
        return UpdateSums(loss, named, mtp, computed=ran)


# Names of an update's sums in the reduction.
_LOSS, _MTP, _COMPUTED, _METRIC = "loss", ("mtp_nll", "mtp_tokens"), ("computed_tokens", "row_tokens"), "metric "


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
