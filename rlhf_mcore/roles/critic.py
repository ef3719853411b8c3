"""The critic: what a response is expected to earn from each of its tokens on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_mcore.algorithms.value_loss import value_loss
from rlhf_mcore.mcore.step import Metrics, scalar_head
from rlhf_mcore.roles.trained import TrainedRole
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class Critic(TrainedRole):
    """A model with a value head, trained on returns."""

    value_clip: float | None

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Values [B, T] fp32 of the states before each response token, and [B] of the states after the last one.

        Collective over the world.
        """
        return self.per_token_and_row(batch, scalar_head)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        assert batch.old_values is not None and batch.returns is not None
        return {"old_values": batch.old_values, "returns": batch.returns}

    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        (values,) = scalar_head(outputs, microbatch)
        fields = {name: value.to(values.device) for name, value in microbatch.fields.items()}
        return value_loss(values, fields["old_values"], fields["returns"], fields["weights"], self.value_clip)

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/value": sums.pop("loss")} | {f"critic/{name}": sums[name] / num_tokens for name in sums}
