"""The critic: predict the return of a response from each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.value_loss import MAX_DEVIATIONS, ReturnNormalizer, value_loss
from rlhf_mcore.mcore.model import MegatronModel, Metrics, scalar_outputs
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.roles.trained_model import Objective, TrainedModel, Update
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(frozen=True, slots=True)
class ValueObjective(Objective):
    """Squared error of the values.

    The new values are clipped around the values before the update, unless ``clip`` is None.
    """

    clip: float | None

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.old_values is not None and batch.returns is not None
        return {"old_values": batch.old_values, "returns": batch.returns}

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        values = scalar_outputs(outputs, microbatch)
        fields = microbatch.fields_on(values.device)
        return value_loss(values, fields["old_values"], fields["returns"], fields["weights"], self.clip)

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/value": loss} | {f"critic/{name}": sums[name] / num_tokens for name in sums}


@dataclass(slots=True)
class Critic:
    """A model with a value head, trained on returns."""

    model: TrainedModel
    value_clip: float | None
    # Converts between the model's normalised outputs and values or returns in original units.
    normalizer: ReturnNormalizer | None = None
    bootstrap: bool = False  # whether states after the last tokens need values

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None]:
        """Compute the values [N] fp32 of the states before each sampled token, zero elsewhere.

        With ``bootstrap``, also return the values [B] of the states after the last tokens, on every rank. Collective
        over the world.
        """
        values, last = self.model.per_token_and_row(batch, scalar_outputs)
        if self.normalizer is not None:
            values = torch.where(batch.loss_mask, self.normalizer.denormalize(values), 0.0)
            last = self.normalizer.denormalize(last)
        return values, last if self.bootstrap else None

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare all updates of a step. See :meth:`TrainedModel.deliver_update`.

        If there is a normalizer, first update it with the step's returns. The model then learns normalised returns.
        """
        if self.normalizer is not None:
            assert batch.old_values is not None and batch.returns is not None
            predicted = self.normalizer.normalize(batch.old_values)
            self.normalizer.update(batch.returns, batch.loss_mask, OwnedRows(batch.rows, batch.lengths, merge_rows))
            targets = self.normalizer.normalize(batch.returns).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
            batch = replace(batch, old_values=predicted, returns=targets)
        return self.model.deliver_update(batch, ValueObjective(self.value_clip))
