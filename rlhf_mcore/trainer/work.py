"""Count the computation of a step per phase, for the metrics tokens per second, TFLOP/s and MFU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.observability.throughput import FORWARD, NO_FLOPS, UPDATE, ModelFlops, RowCounts, Throughput

if TYPE_CHECKING:
    from rlhf_mcore.types import TrainBatch


@dataclass(frozen=True, slots=True)
class TrainedWork:
    """A trained model. ``epochs``: passes of an update over a step's rows. ``mtp``: FLOPs of the trained MTP layers."""

    flops: ModelFlops
    epochs: int = 1
    mtp: ModelFlops = NO_FLOPS


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts the work of a step on the rows of all ranks. ``generates``: the step samples responses on the same devices."""

    throughput: Throughput
    actor: TrainedWork
    critic: TrainedWork | None = None
    reference: ModelFlops | None = None
    generates: bool = False
    teacher: tuple[str, ModelFlops] | None = None  # name of its phase, and its FLOPs
    shares_prefixes: bool = False

    def count(self, batch: TrainBatch, *, learns: bool = True, has_old_pass: bool = False) -> None:
        """Count the work of a step. ``learns``: the actor is updated. ``has_old_pass``: a separate pass computed old logprobs."""
        lengths = batch.lengths
        if batch.sequences:
            lengths = lengths.new_tensor([size for sizes in batch.sequences_of(range(len(lengths))) for size in sizes])
        rows, tokens = counts(lengths, batch.num_sampled), float(lengths.sum())
        add = self.throughput.add
        if self.generates:
            add("generate", rows.sampled, self.actor.flops.forward(_drawn_counts(batch, rows)))
        if self.shares_prefixes:
            rows = _computed_counts(batch, rows)
        if has_old_pass:
            add("old_logprobs", tokens, FORWARD * self.actor.flops.forward(rows))
        if self.reference is not None:
            add("reference", tokens, FORWARD * self.reference.forward(rows))
        if self.teacher is not None:
            add(self.teacher[0], tokens, FORWARD * self.teacher[1].forward(rows))
        if self.critic is not None:
            add("values", tokens, FORWARD * self.critic.flops.forward(rows))
        for trained in (self.actor if learns else None, self.critic):
            if trained is not None:
                forward = trained.flops.forward(rows) + trained.mtp.forward(rows)
                add("update", tokens * trained.epochs, UPDATE * trained.epochs * forward)


def counts(lengths: Tensor, num_sampled: Tensor) -> RowCounts:
    """Return the counts of sequences with ``lengths`` tokens. ``num_sampled``: sampled tokens per row, [B]."""
    n = lengths.double().numpy()
    return RowCounts(float(n.sum()), float(num_sampled.sum()), n, np.zeros(0))


def _drawn_counts(batch: TrainBatch, rows: RowCounts) -> RowCounts:
    """Count the tokens that an engine computes. It computes the prompt of a group once for all responses."""
    return _sparing(rows, (batch.lengths - batch.num_sampled).numpy()[_is_repeated(batch)])


def _computed_counts(batch: TrainBatch, rows: RowCounts) -> RowCounts:
    """Count the tokens that trainers compute with prefix sharing: each shared prefix of a group or episode counts once.

    If a group is split over ranks, each rank computes the prefix again. This work is not counted, so the
    MFU is too low rather than too high.
    """
    if batch.computed is None:
        return rows
    computed, shared = batch.computed.numpy().T
    spared = [shared[_is_repeated(batch)]]
    for row, sizes in batch.sequences.items():  # assume that all branches start at the same fork
        branches = len(sizes) - 1
        spared.append(np.full(branches, (sum(sizes) - computed[row]) / branches))
    return _sparing(rows, np.concatenate(spared))


def _is_repeated(batch: TrainBatch) -> NDArray[np.bool_]:
    """Return a mask of the rows that are not the first of their group, [B]."""
    again = np.ones(batch.num_rows, bool)
    again[np.unique(batch.group_ids.numpy(), return_index=True)[1]] = False
    return again


def _sparing(rows: RowCounts, spared: NDArray[Any]) -> RowCounts:
    return replace(rows, tokens=rows.tokens - float(spared.sum()), spared=spared.astype(float))
