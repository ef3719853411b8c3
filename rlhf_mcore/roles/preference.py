"""A policy that learns to prefer the better of two responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.supervised import Pairs, PreferenceLoss, find_preference_loss, mean_divergence, sum_of_pairs
from rlhf_mcore.config.choices import PREFERENCE_LOSSES
from rlhf_mcore.config.schema import DpoConfig
from rlhf_mcore.data.collate import RowTokens, sequence_ids
from rlhf_mcore.mcore.model import MegatronModel, Metrics
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.roles.policy import logprobs_of
from rlhf_mcore.roles.trained_model import Objective, TrainedModel, Update
from rlhf_mcore.types import Field, Microbatch, TrainBatch

if TYPE_CHECKING:
    from rlhf_mcore.protocols import LogprobModel

METRICS = {
    "accuracy": "accuracy",
    "margin": "margin",
    "chosen": "chosen_reward",
    "rejected": "rejected_reward",
}


@dataclass(frozen=True, slots=True)
class PreferenceObjective(Objective):
    """A loss over pairs: rows 2k and 2k + 1 of a batch are the chosen and the rejected response of a pair."""

    rows_per_unit: ClassVar[int] = 2

    dpo: DpoConfig
    preference_loss: PreferenceLoss
    divergence: float = 0.0  # divergence from the reference, if the loss needs mismatched responses

    def fields(self, batch: TrainBatch) -> dict[str, Field]:
        if not PREFERENCE_LOSSES[self.dpo.loss].needs_reference:
            return {}
        assert batch.ref_logprobs is not None, "computed before the update"
        return {"ref_logprobs": batch.ref_logprobs}

    def weights(self, tokens: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """Return 1 / pairs at the tokens of responses, and zero elsewhere."""
        return (weights > 0) * (self.rows_per_unit / max(num_rows, 1))

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        logprobs = model.logprobs_and_entropy(outputs, microbatch, temperature=1.0, with_entropy=False).logprobs
        fields = microbatch.fields_on(logprobs.device)
        weights, rows = fields["weights"], _RowSums.of(microbatch, fields["weights"])
        reference = fields.get("ref_logprobs")
        pairs = Pairs(
            rows.sums(logprobs).view(-1, 2),
            rows.sums(torch.ones_like(weights)).view(-1, 2),
            None if reference is None else rows.sums(reference).view(-1, 2),
            self.divergence,
        )
        pair_weights = rows.largest(weights).view(-1, 2)[:, 0]
        loss, metrics = sum_of_pairs(pairs, pair_weights, self.preference_loss, self.dpo.nll_coef)
        return loss, {**metrics, "pairs": torch.full_like(loss.detach(), len(pairs.lengths))}

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        named = {f"preference/{name}": sums[key] / pairs for key, name in METRICS.items()}
        if PREFERENCE_LOSSES[self.dpo.loss].needs_mismatched:
            named["preference/divergence"] = self.divergence
        return {"loss/dpo": loss, **named}


@dataclass(frozen=True, slots=True)
class _RowSums:
    """The sequence number of each position of a microbatch, and which positions count."""

    ids: Tensor  # [positions] int64
    counted: Tensor  # [positions] bool
    num_sequences: int  # including the padding at the end of a packed microbatch
    num_rows: int

    @classmethod
    def of(cls, microbatch: Microbatch, weights: Tensor) -> _RowSums:
        ids, count = sequence_ids(microbatch)
        ids = microbatch.placed.get("sequence_ids", ids).to(weights.device)
        return cls(ids.flatten(), weights.flatten() > 0, count, len(microbatch.lengths))

    def sums(self, values: Tensor) -> Tensor:
        """Sum values in the shape of the microbatch over the counted positions of each row: [rows] in fp32."""
        zeros = torch.zeros(self.num_sequences, device=values.device)
        counted = torch.where(self.counted, values.flatten().float(), 0)
        return zeros.index_add(0, self.ids, counted)[: self.num_rows]

    def largest(self, values: Tensor) -> Tensor:
        """Return the maximum of non-negative values per row: [rows]."""
        zeros = torch.zeros(self.num_sequences, device=values.device)
        return zeros.scatter_reduce(0, self.ids, values.flatten(), "amax")[: self.num_rows]


@dataclass(slots=True)
class PreferenceActor:
    """A policy that learns from pairs.

    ``reference``: the frozen policy that the loss compares the policy with; None: the loss needs no reference.
    """

    model: TrainedModel
    dpo: DpoConfig
    reference: LogprobModel | None = None
    _loss: PreferenceLoss = field(init=False)

    def __post_init__(self) -> None:
        self._loss = find_preference_loss(self.dpo)

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute logprobs [N] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, temperature=1.0)

    def compute_reference(self, batch: TrainBatch) -> None:
        """Add logprobs of the reference to a batch. Collective over the world.

        If the loss needs mismatched responses, also add the logprobs of both policies for them.
        """
        assert self.reference is not None, "the loss reads none"
        batch.ref_logprobs = self.reference.compute_logprobs(batch)
        if batch.mismatched is not None:
            batch.mismatched.ref_logprobs = self.reference.compute_logprobs(batch.mismatched)
            batch.mismatched.old_logprobs = self.compute_logprobs(batch.mismatched)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare one update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, PreferenceObjective(self.dpo, self._loss, _divergence(batch)))

    def measure(self, batch: TrainBatch) -> dict[str, float]:
        """Sum loss and metrics over the pairs of a batch, without an update. Collective over the world."""
        if self.reference is not None:
            self.compute_reference(batch)
        reference = None if batch.ref_logprobs is None else _row_sums(batch, batch.ref_logprobs).view(-1, 2)
        logprobs = _row_sums(batch, self.compute_logprobs(batch)).view(-1, 2)
        pairs = Pairs(logprobs, batch.num_sampled.view(-1, 2), reference, _divergence(batch))
        weights = torch.ones(len(pairs.lengths), dtype=torch.float64)
        loss, sums = sum_of_pairs(pairs, weights, self._loss, self.dpo.nll_coef)
        named = {name: float(sums[key]) for key, name in METRICS.items()}
        return {"pairs": float(len(pairs.lengths)), "loss": float(loss), **named}


def _row_sums(batch: TrainBatch, logprobs: Tensor) -> Tensor:
    """Sum logprobs [N] over the response of each row: [B] float64, on every rank. Collective over the world."""
    return OwnedRows(batch.rows, batch.lengths, merge_rows).sums(logprobs, batch.loss_mask)


def _divergence(batch: TrainBatch) -> float:
    """Estimate the divergence of the policy from the reference. Return 0 if the loss does not use it.

    Collective over the world.
    """
    other = batch.mismatched
    if other is None:
        return 0.0
    assert other.old_logprobs is not None and other.ref_logprobs is not None, "computed before the update"
    return mean_divergence(_row_sums(other, other.old_logprobs), _row_sums(other, other.ref_logprobs))
