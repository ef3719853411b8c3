"""The policy of supervised fine-tuning: it learns by imitation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_mcore.algorithms.supervised import perplexity, sft_loss
from rlhf_mcore.mcore.model import MegatronModel, Metrics
from rlhf_mcore.roles.model import Objective, TrainedModel, Update
from rlhf_mcore.roles.policy import logprobs_of
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(frozen=True, slots=True)
class ImitationObjective(Objective):
    """Negative log-likelihood of the responses."""

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        logprobs = model.logprobs_and_entropy(outputs, microbatch, temperature=1.0, with_entropy=False).logprobs
        return sft_loss(logprobs, microbatch.fields_on(logprobs.device)["weights"])

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/sft": loss, "actor/perplexity": perplexity(sums["nll"] / num_tokens)}


@dataclass(slots=True)
class SupervisedActor:
    """A policy that learns to give the responses of the data."""

    model: TrainedModel

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute logprobs [N] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, temperature=1.0)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare one update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, ImitationObjective())
