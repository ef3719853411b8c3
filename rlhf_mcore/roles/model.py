"""A model in a layout of its own, on some ranks of the world or on all of them: run over the rows of a step, and updated.

What a model is trained for is an :class:`Objective`. A role (actor, critic, reward model) is a model plus an objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.algorithms.masking import row_weights
from rlhf_mcore.config.schema import OptimizerConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens, in_units, make_microbatches, restore_last, restore_tokens
from rlhf_mcore.data.packing import balance
from rlhf_mcore.mcore.model import MegatronModel, Metrics, OutputFunction
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.mcore.optimizer import StepOutcome, learning_rate
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.collectives import broadcast_json, reduce_sums
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.parallel.ragged import move_ragged, split_tokens
from rlhf_mcore.parallel.rows import NO_ROWS, Rows, merge_rows, move_rows, rows_by_rank
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.types import Field, LocalParameter, Microbatch, Ragged, TrainBatch

Update = Callable[[], dict[str, float]]


@dataclass(slots=True)
class RoleModel:
    """A model, and the ways to run it over the rows of a step.

    ``model`` is None on ranks outside of the layout: these call the same methods, because they own rows too.
    """

    layout: ParallelLayout
    model: MegatronModel | None
    spec: ModelSpec
    trainer: TrainerConfig
    flops: ModelFlops | None = None  # None: rows are dealt to data-parallel ranks by their tokens alone

    def local_parameters(self) -> list[LocalParameter]:
        """What this rank holds of the model."""
        return self.model.local_parameters() if self.model is not None else []

    def on_device(self) -> AbstractContextManager[None]:
        """The weights are on the device within this block, beside whatever else is there."""
        return self.model.movable.use(WEIGHTS, beside=True) if self.model is not None else nullcontext()

    def deliver(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        fields: Mapping[str, Field],
        rows_per_unit: int = 1,
    ) -> list[RowTokens]:
        """Bring rows from their owners to the data-parallel ranks that the model runs them on. Collective over the world.

        Args:
            parts: rows that are run together, each part dealt to the data-parallel ranks by tokens for itself.
            fields: of the batch, tensors [N, ...] and ragged ones, which travel beside the tokens.
            rows_per_unit: so many consecutive rows of a part stay together.

        Returns:
            This rank's share of each part; nothing on ranks without the model.
        """
        lengths = batch.lengths.numpy()
        shares = [self._shares(batch.lengths, part, rows_per_unit) for part in parts]
        by_replica = [np.array([r for share in shares for r in share[dp]], np.int64) for dp in range(self.layout.dp)]
        wanted: list[Rows] = [NO_ROWS] * dist.get_world_size()
        for rank in self.layout.ranks:
            wanted[rank] = by_replica[self.layout.coordinates(rank)["dp"]]
        tensors = {name: field for name, field in fields.items() if isinstance(field, Tensor)}
        owners = batch.owners.numpy()
        moved = move_rows({"token_ids": batch.token_ids, **tensors}, lengths, owners, wanted)
        ragged = {
            name: move_ragged(field, lengths, owners, wanted)
            for name, field in sorted(fields.items())
            if isinstance(field, Ragged)
        }
        if self.model is None:
            return []
        replica = self.layout.coordinates(dist.get_rank())["dp"]
        mine = [share[replica] for share in shares]
        row_lengths = [lengths[rows].tolist() for rows in mine]
        sizes = [sum(held) for held in row_lengths]
        columns = {name: tensor.split(sizes) for name, tensor in moved.items()}
        others = {name: split_tokens(field, sizes) for name, field in ragged.items()}
        return [
            RowTokens(
                rows,
                row_lengths[number],
                {name: column[number] for name, column in columns.items()},
                {name: column[number] for name, column in others.items()},
            )
            for number, rows in enumerate(mine)
        ]

    def microbatches(self, held: RowTokens, rows_per_unit: int = 1, *, forward_only: bool = False) -> list[Microbatch]:
        """Rows of this rank as microbatches: limited in tokens, padded for its layout, as many as the pipeline needs.

        Where tensor-parallel communication overlaps computation all are filled up to the limit, also without a backward pass.
        Data-parallel ranks among which experts are sharded exchange tokens in every layer, so they all run equally many.
        """
        assert self.model is not None
        limit, multiple = self.trainer.max_tokens_per_microbatch, self.layout.token_multiple
        if self.model.overrides.needs_one_shape:
            limit = multiple = limit // multiple * multiple
        elif forward_only:
            limit = self.trainer.forward_tokens or 2 * limit
        split = partial(
            make_microbatches,
            held,
            rows_per_unit=rows_per_unit,
            max_tokens=limit,
            packing=self.trainer.packing,
            pad_multiple=multiple,
            sequence_multiple=self.layout.sequence_multiple,
            multiple_of=self.layout.pp if self.layout.vpp else 1,
        )
        made = split()
        if self.layout.ep == 1:
            return made
        group = self.model.groups.collection.dp
        most = int(reduce_sums({"count_max": float(len(made))}, group)["count_max"])
        return made if len(made) == most else split(min_count=most)

    def per_token(
        self,
        batch: TrainBatch,
        function: OutputFunction,
        fields: Mapping[str, Field] | None = None,
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """What ``function`` returns at the predictor of each token in the loss mask: [N, *shape] fp32, zero elsewhere.

        Collective over the world. ``fields``: of the batch, as in ``deliver``, that it finds in the microbatches. ``shape``: of what
        it returns for a token.
        """
        return self.to_owners(batch, self._run(batch, function, fields, shape)[1])

    def per_row(self, batch: TrainBatch, function: OutputFunction) -> Tensor:
        """What ``function`` returns at the last token of each row: [B] fp32 on every rank. Collective over the world."""
        last, _ = self._run(batch, function)
        return merge_rows(last)

    def per_token_and_row(self, batch: TrainBatch, function: OutputFunction) -> tuple[Tensor, Tensor]:
        """Both of the above, in one run of the model."""
        last, tokens = self._run(batch, function)
        return self.to_owners(batch, tokens), merge_rows(last)

    def to_owners(self, batch: TrainBatch, tokens: Tensor) -> Tensor:
        """Values of tokens in the loss mask, on the ranks that own the rows: [N, ...] fp32, zero elsewhere. Collective over the world.

        ``tokens``: those of all rows that were run together, back to back on the first rank of each data-parallel rank's last stage.
        """
        holders = np.zeros(batch.num_rows, np.int64)
        for replica, rows in enumerate(self._shares(batch.lengths, range(batch.num_rows), 1)):
            holders[rows] = self.layout.rank_of(dp=replica, pp=self.layout.pp - 1)
        owned = rows_by_rank(batch.owners.numpy(), dist.get_world_size())
        values = move_rows({"values": tokens}, batch.lengths.numpy(), holders, owned)["values"]
        return torch.where(batch.loss_mask.view(-1, *(1 for _ in values.shape[1:])), values, 0.0)

    @property
    def keeps_outputs(self) -> bool:
        """Whether this rank gives the outputs of its data-parallel rank to others."""
        if self.model is None or not self.model.is_last_stage:
            return False
        return self.model.groups.tp_rank == 0 and self.model.groups.cp_rank == 0

    def _run(
        self,
        batch: TrainBatch,
        function: OutputFunction,
        fields: Mapping[str, Field] | None = None,
        shape: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Outputs of all rows where they were computed: [B, *shape], and flat tokens."""
        held = self.deliver(batch, [range(batch.num_rows)], fields or {})
        last, tokens = torch.zeros(batch.num_rows, *shape), torch.zeros(0, *shape)
        if self.model is not None:
            microbatches = self.microbatches(held[0], forward_only=True)
            outputs = self.model.forward(microbatches, function)
            if self.keeps_outputs:
                rows, lengths = held[0].rows, held[0].lengths
                tokens = restore_tokens(outputs, microbatches, lengths)
                last[rows] = restore_last(outputs, microbatches, len(rows))
        return last, tokens

    def _shares(self, lengths: Tensor, rows: Sequence[int], rows_per_unit: int) -> list[list[int]]:
        """The rows of each data-parallel rank, ascending: about equally much to compute. The same on every rank of the world."""
        units, costs = in_units(rows, rows_per_unit), lengths.double()
        if self.flops is not None:  # in units of a token without attention
            costs = costs + self.flops.attention(costs) / (self.flops.token + self.flops.logits)
        sizes = costs[torch.tensor(units, dtype=torch.int64).reshape(-1, rows_per_unit)].sum(1).tolist()
        return [[row for place in share for row in units[place]] for share in balance(sizes, self.layout.dp)]


class Objective(Protocol):
    """What a model is trained for. By default it reads no field, takes the aggregation's token weights, and rows are independent."""

    rows_per_unit: ClassVar[int] = 1  # so many consecutive rows of a batch stay together in a microbatch
    losses: ClassVar[tuple[str, ...]] = ("loss",)  # sums that are means over their minibatch: summed with its weights

    def fields(self, batch: TrainBatch) -> Mapping[str, Field]:
        """What the loss reads of the batch, tensors [N, ...] and ragged fields; it travels with the tokens."""
        return {}

    def weights(self, held: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """Token weights [N] of the loss, from those of the aggregation. ``num_rows``: of the minibatch, over all ranks."""
        return weights

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Loss of a microbatch, summed with ``microbatch.fields["weights"]``, and detached sums over its trainable tokens."""
        ...

    def metrics(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        """Sums over the step's updates under their public names. ``num_tokens``: trainable ones of these updates."""
        ...


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """How a step's rows become updates: ``prompts_per_minibatch`` each, ``epochs`` times over all of them."""

    prompts_per_minibatch: int
    epochs: int = 1
    loss_aggregation: str = "token"
    constant_length: int | None = None


@dataclass(frozen=True, slots=True)
class MinibatchCounts:
    """What a minibatch has over all ranks: trainable tokens, rows, and all tokens of these."""

    sampled: int
    rows: int
    tokens: int


@dataclass(slots=True, kw_only=True)
class TrainedModel(RoleModel):
    """A model with an optimizer, updated by minibatches. ``name`` prefixes the metrics.

    ``trained``: Hugging Face names of the tensors that the optimizer has, None: of all.
    """

    optimizer: OptimizerConfig
    plan: MinibatchPlan
    name: str
    trained: Sequence[str] | None = None
    progress: Callable[[str], None] = lambda text: None  # how far the updates of a step are
    num_updates: int = field(default=0, init=False)  # skipped ones count too
    # Updates in a row, the last one among them, without a finite gradient.
    num_bad: int = field(default=0, init=False)

    def deliver_update(self, batch: TrainBatch, objective: Objective) -> Update:
        """Bring the rows of a step to the ranks that learn from them. Collective over the world.

        Returns:
            What makes all updates of the step. Collective over the ranks of the model alone, so that models on different ranks learn
            at the same time. It returns their metrics, nothing on ranks without the model: means over the tokens, or rows, of all
            updates, as if they were one; of the gradient's norm and the like, over updates. ``<name>/not_finite`` is among them
            when the updates have left a weight or a moment NaN or infinite on any rank.
        """
        parts = minibatches(batch, self.plan.prompts_per_minibatch)
        fields: dict[str, Field] = {"loss_mask": batch.loss_mask, **objective.fields(batch)}
        held = self.deliver(batch, parts, fields, objective.rows_per_unit)
        counts = [
            MinibatchCounts(int(batch.num_sampled[rows].sum()), len(rows), int(batch.lengths[rows].sum()))
            for rows in parts
        ]
        if self.model is None:
            return dict
        weighted = [self._weighted(batch, objective, tokens, count) for tokens, count in zip(held, counts, strict=True)]
        return partial(self._update_all, objective, weighted, counts)

    def makes_one_update(self, batch: TrainBatch) -> bool:
        """Whether a step learns from these rows in one update."""
        return self.plan.epochs == 1 and len(minibatches(batch, self.plan.prompts_per_minibatch)) == 1

    def tokens_of_update(
        self,
        batch: TrainBatch,
        outputs: Sequence[Tensor],
        microbatches: Sequence[Microbatch],
        *,
        shape: tuple[int, ...] = (),
    ) -> Tensor:
        """What a loss has kept of the microbatches of the one update of a step, as ``per_token``. Collective over the world."""
        tokens = torch.zeros(0, *shape)
        if self.keeps_outputs:
            replica = self.layout.coordinates(dist.get_rank())["dp"]
            rows = self._shares(batch.lengths, range(batch.num_rows), 1)[replica]
            tokens = restore_tokens(outputs, microbatches, batch.lengths[rows].tolist())
        return self.to_owners(batch, tokens)

    def _weighted(self, batch: TrainBatch, objective: Objective, held: RowTokens, counts: MinibatchCounts) -> RowTokens:
        """The rows with token weights in place of the loss mask."""
        sampled = batch.num_sampled[held.rows]
        aggregation, constant = self.plan.loss_aggregation, self.plan.constant_length
        per_row = row_weights(
            sampled, aggregation, num_tokens=counts.sampled, num_rows=counts.rows, constant_length=constant
        )
        fields = dict(held.fields)
        lengths = torch.tensor(held.lengths, dtype=torch.int64)
        weights = torch.where(fields.pop("loss_mask"), per_row.repeat_interleave(lengths), 0.0)
        fields["weights"] = objective.weights(held, weights, counts.rows)
        return RowTokens(held.rows, held.lengths, fields, held.ragged)

    def _update_all(
        self, objective: Objective, parts: list[RowTokens], counts: list[MinibatchCounts]
    ) -> dict[str, float]:
        assert self.model is not None
        sums: list[dict[str, float]] = []
        outcomes: list[dict[str, float]] = []
        with self.model.updating():
            for held in parts * self.plan.epochs:
                self.progress(f"{self.name}, update {len(sums) + 1} of {len(parts) * self.plan.epochs}")
                of_update, outcome = self._update(objective, held)
                sums.append(of_update)
                outcomes.append(outcome)
            self.model.gather_weights()
            is_finite = self._all_ranks(self.is_finite())
        found = self._metrics_of_step(objective, sums, counts * self.plan.epochs)
        found |= {
            f"{self.name}/{key}": sum(outcome[key] for outcome in outcomes) / len(outcomes) for key in outcomes[0]
        }
        if not is_finite:
            found[f"{self.name}/not_finite"] = 1.0
        return found | {f"{self.name}/bad_updates_in_a_row": float(self.num_bad)}

    def _metrics_of_step(
        self, objective: Objective, sums: list[dict[str, float]], counts: list[MinibatchCounts]
    ) -> dict[str, float]:
        """Sums of all updates over what all of them count. A loss weighs as much as what it is a mean of: tokens, or rows."""
        by_tokens = self.plan.loss_aggregation == "token"
        masses = {key: [count.sampled if by_tokens else count.rows for count in counts] for key in objective.losses}
        masses["load_balance"] = [count.tokens for count in counts]
        total = {}
        for name in sums[0]:
            shares = _shares_of(masses[name]) if name in masses else [1.0] * len(sums)
            total[name] = sum(share * found[name] for share, found in zip(shares, sums, strict=True))
        mtp_nll, mtp_tokens = total.pop("mtp_nll", None), total.pop("mtp_tokens", 0.0)
        balance = total.pop("load_balance", None)
        named = objective.metrics(total, max(float(sum(count.sampled for count in counts)), 1.0))
        if mtp_nll is not None:
            named[f"{self.name}/mtp_loss"] = mtp_nll / max(mtp_tokens, 1.0)
        if balance is not None:
            named[f"{self.name}/load_balance"] = balance
        return named

    def is_finite(self) -> bool:
        """Whether the weights and the optimizer's state on this rank hold no NaN and no infinity. Local."""
        return self.model is None or self.model.optimizer is None or self.model.optimizer.is_finite()

    def _update(self, objective: Objective, held: RowTokens) -> tuple[dict[str, float], dict[str, float]]:
        """One update. Returns its sums, and what there is one of by update."""
        assert self.model is not None
        microbatches = self.microbatches(held, objective.rows_per_unit)
        metrics = self.model.forward_backward(microbatches, partial(objective.loss, self.model))
        sums = self._reduce(metrics)
        lr = learning_rate(self.num_updates, self.optimizer.lr, self.optimizer.schedule)
        # The loss may be NaN on one tensor-parallel rank alone; all ranks of the role have to skip the same updates.
        outcome = StepOutcome(False, math.nan, finite=False)
        if self._all_ranks(math.isfinite(sums["loss"])):
            outcome = self.model.step(lr)
        self.num_updates += 1
        self.num_bad = 0 if outcome.finite else self.num_bad + 1
        if self.model.aux_loss_coef:
            sums["load_balance"] = self.model.load_balance()
        optimizer = {"grad_norm": outcome.grad_norm, "lr": lr, "skipped_updates": float(not outcome.updated)}
        if self.model.mtp is not None and self.model.mtp.alone:
            optimizer["mtp_grad_norm"] = outcome.norm_alone
        return sums, optimizer

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
            device = metrics[0]["loss"].device
            sums_of = (sum(m[name] for m in metrics) for name in metrics[0])
            values = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in sums_of]
            local = dict(zip(metrics[0], torch.stack(values).tolist(), strict=True))  # waits for the device once
            sums = reduce_sums(local, groups.collection.dp)
        if groups.layout.pp > 1:
            sums = broadcast_json(sums, groups.layout.pp - 1, groups.collection.pp)
        return sums


def _shares_of(masses: Sequence[int]) -> list[float]:
    total = sum(masses)
    return [mass / total if total else 1.0 / len(masses) for mass in masses]


def minibatches(batch: TrainBatch, prompts_per_minibatch: int) -> list[list[int]]:
    """Rows of each minibatch: those of consecutive prompts. It depends on the prompts only, never on a layout."""
    numbers = torch.div(batch.group_ids, prompts_per_minibatch, rounding_mode="floor")
    return [(numbers == number).nonzero().flatten().tolist() for number in numbers.unique().tolist()]
