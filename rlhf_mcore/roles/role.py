"""What all roles share: a model in a layout of its own, on some ranks of the world or on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.data.balance import balance
from rlhf_mcore.data.collate import RowTokens, in_units, make_microbatches, restore_last, restore_tokens
from rlhf_mcore.mcore.families import ModelSpec
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.offload import HostWeights
from rlhf_mcore.mcore.step import Head, forward
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.parallel.rows import NO_ROWS, Rows, merge_rows, move_rows, rows_by_rank
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class RoleModel:
    """A model, and the ways to run it over the rows of a step.

    ``model`` is None on ranks outside of the layout: these call the same methods, because they own rows too.
    """

    layout: ParallelLayout
    model: MegatronModel | None
    spec: ModelSpec
    trainer: TrainerConfig
    # Of a model that leaves the device between uses.
    host_weights: HostWeights | None = field(default=None, kw_only=True)

    def deliver(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        fields: Mapping[str, Tensor],
        rows_per_unit: int = 1,
    ) -> list[RowTokens]:
        """Bring rows from their owners to the data-parallel ranks that the model runs them on. Collective over the world.

        Args:
            parts: rows that are run together, each part dealt to the data-parallel ranks by tokens for itself.
            fields: [N] tensors of the batch that travel beside the tokens.
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
        moved = move_rows({"token_ids": batch.token_ids, **fields}, lengths, batch.owners.numpy(), wanted)
        if self.model is None:
            return []
        mine = [share[self._replica()] for share in shares]
        row_lengths = [lengths[rows].tolist() for rows in mine]
        columns = {name: tensor.split([sum(held) for held in row_lengths]) for name, tensor in moved.items()}
        return [
            RowTokens(rows, row_lengths[number], {name: column[number] for name, column in columns.items()})
            for number, rows in enumerate(mine)
        ]

    def microbatches(self, held: RowTokens, rows_per_unit: int = 1) -> list[Microbatch]:
        """Rows of this rank as the layout wants them: cut by tokens, padded for sequence parallelism, counted for the pipeline.

        Where experts are spread over data-parallel ranks these exchange tokens in every layer, so all run equally many.
        """
        assert self.model is not None
        cut = partial(
            make_microbatches,
            held,
            rows_per_unit=rows_per_unit,
            max_tokens=self.trainer.max_tokens_per_microbatch,
            packing=self.trainer.packing,
            pad_multiple=self.layout.tp if self.layout.sequence_parallel else 1,
            multiple_of=self.layout.pp if self.layout.vpp else 1,
        )
        made = cut()
        if self.layout.ep == 1:
            return made
        group = self.model.groups.collection.dp
        most = int(reduce_sums({"count_max": float(len(made))}, group)["count_max"])
        return made if len(made) == most else cut(min_count=most)

    def per_token(self, batch: TrainBatch, head: Head) -> Tensor:
        """The first output of ``head`` at the predictor of each token in the loss mask: [N] fp32, zero elsewhere.

        Collective over the world.
        """
        return self.per_token_and_row(batch, head)[0]

    def per_row(self, batch: TrainBatch, head: Head) -> Tensor:
        """The first output of ``head`` at the last token of each row: [B] fp32 on every rank. Collective over the world."""
        last, _, _ = self._run(batch, head)
        return merge_rows(last)

    def per_token_and_row(self, batch: TrainBatch, head: Head) -> tuple[Tensor, Tensor]:
        """Both of the above, in one run of the model."""
        last, tokens, holders = self._run(batch, head)
        owned = rows_by_rank(batch.owners.numpy(), dist.get_world_size())
        moved = move_rows({"values": tokens}, batch.lengths.numpy(), holders, owned)
        return torch.where(batch.loss_mask, moved["values"], 0.0), merge_rows(last)

    def _run(self, batch: TrainBatch, head: Head) -> tuple[Tensor, Tensor, Rows]:
        """Outputs of all rows where they were computed: [B]; flat tokens, and the rank that holds each row."""
        everything = range(batch.num_rows)
        held = self.deliver(batch, [everything], {})
        last, tokens = torch.zeros(batch.num_rows), torch.zeros(0)
        if self.model is not None:
            microbatches = self.microbatches(held[0])
            with self.on_device():
                outputs = [out[0] for out in forward(self.model, microbatches, head)]
            if self.model.is_last_stage and self.model.groups.tp_rank == 0:
                rows, lengths = held[0].rows, held[0].lengths
                tokens = restore_tokens(outputs, microbatches, lengths)
                last[rows] = restore_last(outputs, microbatches, len(rows))
        holders = np.zeros(batch.num_rows, np.int64)
        for replica, rows in enumerate(self._shares(batch.lengths, everything, 1)):
            holders[rows] = self.layout.rank_of(dp=replica, pp=self.layout.pp - 1)
        return last, tokens, holders

    def _shares(self, lengths: Tensor, rows: Sequence[int], rows_per_unit: int) -> list[list[int]]:
        """The rows of each data-parallel rank, ascending. The same on every rank of the world."""
        units = in_units(rows, rows_per_unit)
        sizes = lengths[torch.tensor(units, dtype=torch.int64).reshape(-1, rows_per_unit)].sum(1).tolist()
        return [[row for place in share for row in units[place]] for share in balance(sizes, self.layout.dp)]

    def _replica(self) -> int:
        return self.layout.coordinates(dist.get_rank())["dp"]

    def on_device(self) -> AbstractContextManager[None]:
        """The weights are on the device within this block."""
        return self.host_weights.resident() if self.host_weights is not None else nullcontext()


def minibatches(batch: TrainBatch, prompts_per_minibatch: int) -> list[list[int]]:
    """Rows of each minibatch: those of consecutive prompts. It depends on the prompts only, never on a layout."""
    numbers = torch.div(batch.group_ids, prompts_per_minibatch, rounding_mode="floor")
    return [(numbers == number).nonzero().flatten().tolist() for number in numbers.unique().tolist()]
