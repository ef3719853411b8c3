"""Roles that learn from given responses: a policy that imitates them, and a reward model that tells better from worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.supervised import bradley_terry_loss, perplexity, sft_loss
from rlhf_mcore.data.collate import last_positions
from rlhf_mcore.mcore.step import Metrics, policy_head, scalar_head
from rlhf_mcore.roles.policy import logprobs_of
from rlhf_mcore.roles.trained import TrainedRole
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class SupervisedActor(TrainedRole):
    """A policy that learns to give the responses of the data."""

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [B, T] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self, batch, temperature=1.0)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {}

    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        assert self.model is not None
        logprobs, _ = policy_head(self.model, 1.0, outputs, microbatch)
        return sft_loss(logprobs, microbatch.fields["weights"].to(logprobs.device))

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/sft": sums["loss"], f"{self.name}/perplexity": perplexity(sums["nll"] / num_tokens)}


@dataclass(slots=True)
class RewardModelTrainer(TrainedRole):
    """A reward model that learns from pairs. Rows 2k and 2k + 1 of a batch are the chosen and the rejected response of a pair.

    The score of a row is what the model says at its last token, as ``RewardModel`` takes it.
    """

    rows_per_unit: ClassVar[int] = 2

    centering: float

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        """[B] fp32. Collective over the world."""
        return self.per_row(batch, scalar_head)

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {}

    def reweigh(self, batch: TrainBatch, weights: Tensor) -> Tensor:
        """1 / pairs at the last token of each row of the minibatch, and nothing elsewhere."""
        held = weights > 0
        last = torch.zeros(weights.shape).scatter_(1, batch.lengths[:, None] - 1, 1.0)
        return last * held * self.rows_per_unit / max(int(held.any(1).sum()), 1)

    def loss(self, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        (says,) = scalar_head(outputs, microbatch)
        last = last_positions(microbatch).to(says.device)
        # A field holds at each position the value of the token after it, so the last token's is one before.
        weights = microbatch.fields["weights"].to(says.device).flatten()[last - 1]
        pairs, scores = weights.view(-1, 2), says.flatten()[last].view(-1, 2)
        loss, metrics = bradley_terry_loss(scores[:, 0], scores[:, 1], pairs[:, 0], centering=self.centering)
        return loss, {**metrics, "pairs": (pairs[:, 0] > 0).sum().float()}

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss/reward_model": sums["loss"],
            f"{self.name}/accuracy": sums["accuracy"] / pairs,
            f"{self.name}/margin": sums["margin"] / pairs,
            f"{self.name}/score_mean": (sums["chosen"] + sums["rejected"]) / (2 * pairs),
        }
