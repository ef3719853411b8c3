"""Roles that learn from given responses: a policy that imitates them, and a reward model that tells better from worse."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.supervised import bradley_terry_loss, perplexity, sft_loss
from rlhf_mcore.data.collate import RowTokens, last_positions
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.step import Metrics, policy_head, scalar_head
from rlhf_mcore.roles.policy import logprobs_of
from rlhf_mcore.roles.trained import TrainedModel, Update
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(frozen=True, slots=True)
class ImitationObjective:
    """Negative log-likelihood of the responses."""

    rows_per_unit: ClassVar[int] = 1

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {}

    def weights(self, held: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        return weights

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        logprobs, _ = policy_head(model, 1.0, outputs, microbatch)
        return sft_loss(logprobs, microbatch.fields["weights"].to(logprobs.device))

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/sft": sums["loss"], "actor/perplexity": perplexity(sums["nll"] / num_tokens)}


@dataclass(slots=True)
class SupervisedActor:
    """A policy that learns to give the responses of the data."""

    model: TrainedModel

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, temperature=1.0)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """One update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, ImitationObjective())


@dataclass(frozen=True, slots=True)
class PairwiseObjective:
    """Bradley-Terry: rows 2k and 2k + 1 of a batch are the chosen and the rejected response of a pair.

    The score of a row is the model's output at its last token, as ``RewardModel`` takes it.
    """

    rows_per_unit: ClassVar[int] = 2

    centering: float

    def fields(self, batch: TrainBatch) -> dict[str, Tensor]:
        return {}

    def weights(self, held: RowTokens, weights: Tensor, num_rows: int) -> Tensor:
        """1 / pairs at the last token of each row, and nothing elsewhere."""
        last = torch.tensor(list(accumulate(held.lengths)), dtype=torch.int64) - 1
        return torch.zeros_like(weights).index_fill_(0, last, self.rows_per_unit / max(num_rows, 1))

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        (found,) = scalar_head(outputs, microbatch)
        last = last_positions(microbatch).to(found.device)
        # A field holds at each position the value of the token after it, so the last token's is one before.
        weights = microbatch.fields["weights"].to(found.device).flatten()[last - 1]
        pairs, scores = weights.view(-1, 2), found.flatten()[last].view(-1, 2)
        loss, metrics = bradley_terry_loss(scores[:, 0], scores[:, 1], pairs[:, 0], centering=self.centering)
        return loss, {**metrics, "pairs": (pairs[:, 0] > 0).sum().float()}

    def named(self, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            "loss/reward_model": sums["loss"],
            "reward_model/accuracy": sums["accuracy"] / pairs,
            "reward_model/margin": sums["margin"] / pairs,
            "reward_model/score_mean": (sums["chosen"] + sums["rejected"]) / (2 * pairs),
        }


@dataclass(slots=True)
class RewardModelTrainer:
    """A reward model that learns from pairs."""

    model: TrainedModel
    centering: float

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        """[B] fp32, on every rank. Collective over the world."""
        return self.model.per_row(batch, scalar_head)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """One update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, PairwiseObjective(self.centering))
