"""Run a model over the rows of a step. The model has its own layout, on some or all ranks of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.questions import FP8_TOKENS
from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.data.collate import RowTokens, in_units, make_microbatches, restore_last, restore_tokens
from rlhf_mcore.data.prefixes import Bundle, deal_bundles, rows_with_other_routes
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.mcore.model import MegatronModel, OutputFunction
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.parallel.rows import NO_ROWS, Rows, merge_rows, move_fields, move_rows, rows_by_rank, split_tokens
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.types import ROUTES, Field, Microbatch, Ragged, RowSizes, TrainBatch

Deal = list[list[int]]  # the rows of each data-parallel rank


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """Outputs of a model for all rows of a batch: a tensor in model layout for each microbatch of this rank."""

    deal: Deal
    outputs: Sequence[Tensor] = ()
    microbatches: Sequence[Microbatch] = ()


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

    def blend(self, other: RoleModel, share: float) -> None:
        """Replace this rank's weights by 1 - ``share`` times themselves plus ``share`` times the weights of ``other``.

        Both have the same layout. ``other`` may contain further layers, such as MTP layers. Local.
        """
        if self.model is None or other.model is None:
            return
        with other.model.movable.use(WEIGHTS), self.model.movable.use(WEIGHTS, writes=True), torch.no_grad():
            sources = {parameter.name: parameter.tensor for parameter in other.model.local_parameters()}
            for parameter in self.model.local_parameters():
                source = sources[parameter.name].to(parameter.tensor.dtype)
                if share == 1.0:
                    parameter.tensor.copy_(source)
                else:
                    parameter.tensor.lerp_(source, share)

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

        If the model has the replicas that own the rows, each replica runs its own rows. Otherwise, see ``balance``.

        Args:
            batch: the rows of the step.
            rows: the rows to distribute; None: all rows.
            rows_per_unit: number of consecutive rows that stay together.
        """
        rows = range(batch.num_rows) if rows is None else rows
        if batch.replicas != self.layout.replicas:
            return self.balance(batch.sizes, rows, rows_per_unit)
        assert rows_per_unit == 1, "owners are chosen for single rows"
        replica_of = {rank: replica for replica, ranks in enumerate(batch.replicas) for rank in ranks}
        deal: Deal = [[] for _ in batch.replicas]
        owners = batch.owners.tolist()
        for row in rows:
            deal[replica_of[owners[row]]].append(row)
        return deal

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
        return zero_outside_mask(batch, self.to_owners(batch, self._run(batch, function, fields), shape))

    def per_row(self, batch: TrainBatch, function: OutputFunction) -> Tensor:
        """Return the result of ``function`` at the last token of each row: [B] fp32 on every rank.

        Collective over the world.
        """
        return self._merge_last(batch, self._run(batch, function))

    def per_token_and_row(self, batch: TrainBatch, function: OutputFunction) -> tuple[Tensor, Tensor]:
        """Return the results of ``per_token`` and ``per_row`` from one run of the model."""
        found = self._run(batch, function)
        return zero_outside_mask(batch, self.to_owners(batch, found)), self._merge_last(batch, found)

    def to_owners(
        self,
        batch: TrainBatch,
        found: RowOutputs,
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Send outputs at all tokens to the owners of the rows: [N, *shape]. Collective over the world.

        ``shape``: shape of the output for one token.
        """
        tokens, holders = torch.zeros(0, *shape, dtype=dtype), np.zeros(batch.num_rows, np.int64)
        for rank, rows in zip(self.output_ranks, found.deal, strict=True):
            holders[rows] = rank
        if self.keeps_outputs:
            lengths = [size for sizes in batch.sequences_of(self._own_rows(found)) for size in sizes]
            tokens = restore_tokens(found.outputs, found.microbatches, lengths, dtype)
        owned = rows_by_rank(batch.owners.numpy(), dist.get_world_size())
        return move_rows({"values": tokens}, batch.lengths.numpy(), holders, owned)["values"]

    def _merge_last(self, batch: TrainBatch, found: RowOutputs) -> Tensor:
        """Return the outputs at the last tokens of all rows: [B] fp32 on every rank. Collective over the world."""
        last = torch.zeros(batch.num_rows)
        if self.keeps_outputs:
            rows = self._own_rows(found)
            ends = [*accumulate(map(len, batch.sequences_of(rows)))]
            of_sequences = restore_last(found.outputs, found.microbatches, ends[-1] if ends else 0)
            last[rows] = of_sequences[[end - 1 for end in ends]]
        return merge_rows(last)

    def _own_rows(self, found: RowOutputs) -> list[int]:
        return found.deal[self.layout.coordinates(dist.get_rank())["dp"]]

    def _run(
        self, batch: TrainBatch, function: OutputFunction, fields: Mapping[str, Field] | None = None
    ) -> RowOutputs:
        """Run all rows of a batch. Collective over the world."""
        deal = self.deal(batch)
        parts = self.deliver(batch, [deal], fields or {})
        if self.model is None:
            return RowOutputs(deal)
        microbatches = self.microbatches(parts[0], forward_only=True)
        return RowOutputs(deal, self.model.forward(microbatches, function), microbatches)


def zero_outside_mask(batch: TrainBatch, values: Tensor) -> Tensor:
    """Set values [N, ...] of tokens outside the loss mask to zero."""
    return torch.where(batch.loss_mask.view(-1, *(1 for _ in values.shape[1:])), values, 0.0)
