"""The roles with a scalar head: the critic, and reward models.

The critic predicts the return of a response from each of its tokens. A reward model scores whole responses, and learns
from pairs of a better and a worse response.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.supervised import bradley_terry_loss
from rlhf_mcore.algorithms.value_loss import MAX_DEVIATIONS, ReturnNormalizer, value_loss
from rlhf_mcore.data.collate import RowTokens, last_positions
from rlhf_mcore.mcore.model import MegatronModel, Metrics, scalar_outputs
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.roles.model import RoleModel
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


@dataclass(slots=True)
class RewardModel:
    """A sequence-classification model with one label. The score of a row is the output at its last token."""

    model: RoleModel

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        """Compute the scores [B] fp32, on every rank. Collective over the world."""
        return self.model.per_row(batch, scalar_outputs)


@dataclass(frozen=True, slots=True)
class PairwiseObjective(Objective):
    """The Bradley-Terry loss. Rows 2k and 2k + 1 of a batch are the chosen and the rejected response of a pair.

    The score of a row is the model's output at its last token, as in ``RewardModel``.
    """

    rows_per_unit: ClassVar[int] = 2

    centering: float

    def weights(self, tokens: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """Return 1 / pairs at the last token of each row, and zero elsewhere."""
        last = torch.tensor(list(accumulate(tokens.lengths)), dtype=torch.int64) - 1
        return torch.zeros_like(weights).index_fill_(0, last, self.rows_per_unit / max(num_rows, 1))

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        scalars = scalar_outputs(outputs, microbatch)
        last = microbatch.placed.get("last_positions", last_positions(microbatch)).to(scalars.device)
        # A field contains at each position the value for the next token. The last token's value is therefore at the
        # position before.
        weights = microbatch.fields_on(scalars.device)["weights"].flatten()[last - 1]
        pairs, scores = weights.view(-1, 2), scalars.flatten()[last].view(-1, 2)
        loss, metrics = bradley_terry_loss(scores[:, 0], scores[:, 1], pairs[:, 0], centering=self.centering)
        return loss, {**metrics, "pairs": (pairs[:, 0] > 0).sum().float()}

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss/reward_model": loss,
            "reward_model/accuracy": sums["accuracy"] / pairs,
            "reward_model/margin": sums["margin"] / pairs,
            "reward_model/score_mean": (sums["chosen"] + sums["rejected"]) / (2 * pairs),
        }


@dataclass(slots=True)
class RewardModelTrainer(RewardModel):
    """A reward model that learns from pairs."""

    model: TrainedModel
    centering: float

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare one update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, PairwiseObjective(self.centering))
