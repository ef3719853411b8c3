"""Count what a step computes, by phase: for tokens per second, TFLOP/s and MFU in the metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlhf_mcore.observability.throughput import FORWARD, NO_FLOPS, UPDATE, ModelFlops, RowCounts, Throughput

if TYPE_CHECKING:
    from rlhf_mcore.types import TrainBatch


@dataclass(frozen=True, slots=True)
class TrainedWork:
    """A model that is updated, and the passes of an update over the rows of a step. ``mtp``: of its MTP layers that learn."""

    flops: ModelFlops
    epochs: int = 1
    mtp: ModelFlops = NO_FLOPS


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts the work of steps on rows of all ranks. ``generates``: responses are drawn within the step, on the same devices."""

    throughput: Throughput
    actor: TrainedWork
    critic: TrainedWork | None = None
    reference: ModelFlops | None = None
    generates: bool = False
    teacher: tuple[str, ModelFlops] | None = None  # with the name of its phase

    def count(self, batch: TrainBatch, *, learns: bool = True, has_old_pass: bool = False) -> None:
        """Count the work of a step. ``learns``: the actor learns too. ``has_old_pass``: old logprobs had a pass of their own."""
        lengths = batch.lengths
        if batch.sequences:
            lengths = lengths.new_tensor([size for sizes in batch.sequences_of(range(len(lengths))) for size in sizes])
        rows, tokens = counts(lengths, batch.num_sampled), float(lengths.sum())
        add = self.throughput.add
        if self.generates:
            add("generate", rows.sampled, self.actor.flops.forward(_drawn_counts(batch, rows)))
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
    """Count sequences of so many tokens, of rows [B] of which so many were sampled."""
    n = lengths.double().numpy()
    return RowCounts(float(n.sum()), float(num_sampled.sum()), n, np.zeros(0))


def _drawn_counts(batch: TrainBatch, rows: RowCounts) -> RowCounts:
    """Count what an engine computes that reads the prompt of a group once, for all of its responses."""
    prompts = (batch.lengths - batch.num_sampled).numpy()
    again = np.ones(len(prompts), bool)
    again[np.unique(batch.group_ids.numpy(), return_index=True)[1]] = False
    spared = prompts[again].astype(float)
    return replace(rows, tokens=rows.tokens - float(spared.sum()), spared=spared)
