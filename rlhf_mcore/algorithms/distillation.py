"""On-policy distillation: a student learns from a teacher's probabilities of the tokens that the student has sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator
from rlhf_mcore.algorithms.kl import kl_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


@advantage_estimator("distillation")
def distillation(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Ignore the scores and use only the teacher's advantages (Thinking Machines Lab 2025, On-Policy Distillation)."""
    return Advantages(torch.zeros(inputs.rewards.shape, dtype=torch.float32))


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(student || teacher) at each sampled token: log pi_student - log pi_teacher, zero outside ``mask`` (k1).

    If the advantage is minus this estimate, the policy gradient is the gradient of the reverse KL of a token's distribution, with
    discount 0 (Agarwal et al. 2023, arXiv 2306.13649, without the gradient through the sampling of earlier tokens; Gu et al. 2023,
    arXiv 2306.08543, eq. 4). Its expectation is zero exactly if student and teacher agree.

    Args:
        logprobs: [N] logprobs of the student that has sampled the tokens, over the whole vocabulary.
        teacher_logprobs: [N], at the same temperature.
        mask: [N] bool.
    """
    return kl_penalty(logprobs, teacher_logprobs, "k1", mask=mask)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence D: the sum over events of a term that depends on the teacher's probability t and the student's probability p.

    ``forward_kl`` is t log(t / p), ``reverse_kl`` p log(p / t). ``jsd`` is beta t log(t / m) + (1 - beta) p log(p / m) with
    m = beta t + (1 - beta) p: the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv 2306.13649, eq. 1). Divided by
    beta, it tends to the forward KL for small beta. Divided by 1 - beta, it tends to the reverse KL for beta near 1.
    """

    kind: str
    beta: float = 0.5
    coef: float = 1.0  # weight in the loss

    def terms(self, log_t: Tensor, log_p: Tensor) -> Tensor:
        """Compute the term of each event from finite logprobs. The result has their shape."""
        if self.kind == "forward_kl":
            return log_t.exp() * (log_t - log_p)
        if self.kind == "reverse_kl":
            return log_p.exp() * (log_p - log_t)
        log_m = self._log_mixture(log_t, log_p)
        return self.beta * log_t.exp() * (log_t - log_m) + (1 - self.beta) * log_p.exp() * (log_p - log_m)

    def slopes(self, log_t: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Compute p times the derivative of each term with respect to p [n, k + 1], and this derivative of the last event [n].

        Both results leave out a constant that is equal for all events. It does not change the gradient, because the probabilities of
        all events add up to 1.
        """
        if self.kind == "forward_kl":
            # The last event is the rest of the vocabulary. The clamp bounds its derivative if the student's probability is near 0.
            return -log_t.exp(), -(log_t[:, -1] - log_p[:, -1]).clamp(max=80.0).exp()
        slopes = log_p - log_t
        if self.kind == "jsd":
            slopes = (1 - self.beta) * (log_p - self._log_mixture(log_t, log_p))
        return log_p.exp() * slopes, slopes[:, -1]

    def _log_mixture(self, log_t: Tensor, log_p: Tensor) -> Tensor:
        return torch.logaddexp(math.log(self.beta) + log_t, math.log1p(-self.beta) + log_p)
