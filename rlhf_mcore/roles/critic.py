"""The critic: what a response is expected to earn from each of its tokens on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rlhf_mcore.algorithms.value_loss import MAX_DEVIATIONS, ReturnNormalizer, value_loss
from rlhf_mcore.mcore.step import Metrics, scalar_head
from rlhf_mcore.roles.trained import TrainedRole
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class Critic(TrainedRole):
    """A model with a value head, trained on returns."""

    value_clip: float | None
    normalizer: ReturnNormalizer | None = None  # the model predicts in its units; values and returns outside are plain
    bootstrap: bool = False  # whether the states after the last tokens need values

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None]:
        """Values [B, T] fp32 of the states before each response token, and [B] of those after the last one (``bootstrap``, else None).

        Collective over the world.
        """
        if self.bootstrap:
            values, last = self.per_token_and_row(batch, scalar_head)
        else:
            values, last = self.per_token(batch, scalar_head), None
        if self.normalizer is None:
            return values, last
        inside = self.normalizer.denormalize(values).masked_fill(~batch.loss_mask, 0.0)
        return inside, self.normalizer.denormalize(last) if last is not None else None

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """All updates of a step. With a normalizer, which takes in the step's returns first, in its units."""
        if self.normalizer is not None:
            assert batch.old_values is not None and batch.returns is not None
            said = self.normalizer.normalize(batch.old_values)
            self.normalizer.update(batch.returns, batch.loss_mask)
            targets = self.normalizer.normalize(batch.returns).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
            batch = replace(batch, old_values=said, returns=targets)
        return TrainedRole.update(self, batch)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.old_values is not None and batch.returns is not None
        return {"old_values": batch.old_values, "returns": batch.returns}

    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        (values,) = scalar_head(outputs, microbatch)
        fields = {name: value.to(values.device) for name, value in microbatch.fields.items()}
        return value_loss(values, fields["old_values"], fields["returns"], fields["weights"], self.value_clip)

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/value": sums.pop("loss")} | {f"critic/{name}": sums[name] / num_tokens for name in sums}
