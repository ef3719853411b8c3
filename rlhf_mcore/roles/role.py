"""What all roles share: a model in a layout of its own, on some ranks of the world or on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.data.balance import balance
from rlhf_mcore.data.collate import in_units, make_microbatches, restore_last, restore_rows
from rlhf_mcore.mcore.families import ModelSpec
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.offload import HostWeights
from rlhf_mcore.mcore.step import Head, forward
from rlhf_mcore.parallel.collectives import merge_rows, merge_tokens, reduce_sums
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class Role:
    """A model, and the ways to run it over the rows of a step.

    ``model`` is None on ranks that hold no part of it: these call the same methods, and get the same results.
    """

    rows_per_unit: ClassVar[int] = 1  # so many consecutive rows of a batch stay together in a microbatch

    model: MegatronModel | None
    spec: ModelSpec
    trainer: TrainerConfig
    host_weights: HostWeights | None = field(
        default=None, kw_only=True
    )  # of a model that leaves the device between uses

    def microbatches(self, batch: TrainBatch, rows: Sequence[int], fields: Mapping[str, Tensor]) -> list[Microbatch]:
        """This rank's share of ``rows``, as the model's layout wants it.

        Rows are dealt to data-parallel ranks by tokens; then cut by tokens, padded for sequence parallelism, counted for the pipeline.
        Where experts are spread over data-parallel ranks these exchange tokens in every layer, so all run equally many.
        """
        assert self.model is not None
        groups, layout = self.model.groups, self.model.groups.layout
        units = in_units(rows, self.rows_per_unit)
        share = balance([int(batch.lengths[unit].sum()) for unit in units], layout.dp)[groups.dp_rank]
        cut = partial(
            make_microbatches,
            batch,
            [row for place in share for row in units[place]],
            rows_per_unit=self.rows_per_unit,
            fields=fields,
            max_tokens=self.trainer.max_tokens_per_microbatch,
            packing=self.trainer.packing,
            pad_multiple=layout.tp if layout.sequence_parallel else 1,
            multiple_of=layout.pp if layout.vpp else 1,
        )
        made = cut()
        if layout.ep == 1:
            return made
        most = int(reduce_sums({"count_max": float(len(made))}, groups.collection.dp)["count_max"])
        return made if len(made) == most else cut(min_count=most)

    def per_token(self, batch: TrainBatch, head: Head) -> Tensor:
        """The first output of ``head`` at the predictor of each response token: [B, T] fp32, zero outside the loss mask.

        Collective over the world.
        """
        outputs, microbatches = self._forward(batch, head)
        local = restore_rows(outputs, microbatches, *batch.token_ids.shape)
        return merge_tokens(local, batch.loss_mask)

    def per_row(self, batch: TrainBatch, head: Head) -> Tensor:
        """The first output of ``head`` at the last token of each row: [B] fp32. Collective over the world."""
        outputs, microbatches = self._forward(batch, head)
        return merge_rows(restore_last(outputs, microbatches, len(batch.lengths)))

    def per_token_and_row(self, batch: TrainBatch, head: Head) -> tuple[Tensor, Tensor]:
        """Both of the above, in one run of the model."""
        outputs, microbatches = self._forward(batch, head)
        local = restore_rows(outputs, microbatches, *batch.token_ids.shape)
        last = restore_last(outputs, microbatches, len(batch.lengths))
        return merge_tokens(local, batch.loss_mask), merge_rows(last)

    def _forward(self, batch: TrainBatch, head: Head) -> tuple[list[Tensor], list[Microbatch]]:
        """Outputs of this rank's rows; nothing on ranks that do not speak for their replica of the model."""
        if self.model is None:
            return [], []
        microbatches = self.microbatches(batch, range(len(batch.lengths)), {})
        with self._on_device():
            outputs = [out[0] for out in forward(self.model, microbatches, head)]
        speaks = self.model.is_last_stage and self.model.groups.tp_rank == 0
        return (outputs, microbatches) if speaks else ([], [])

    def _on_device(self) -> AbstractContextManager[None]:
        return self.host_weights.resident() if self.host_weights is not None else nullcontext()


def minibatches(batch: TrainBatch, prompts_per_minibatch: int) -> list[list[int]]:
    """Rows of each minibatch: those of consecutive prompts. It depends on the prompts only, never on a layout."""
    numbers = torch.div(batch.group_ids, prompts_per_minibatch, rounding_mode="floor")
    return [(numbers == number).nonzero().flatten().tolist() for number in numbers.unique().tolist()]
