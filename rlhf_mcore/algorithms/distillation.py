"""On-policy distillation: a student learns from a teacher's probabilities of the tokens that the student has drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator
from rlhf_mcore.algorithms.kl import kl_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


@advantage_estimator("distillation")
def distillation(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Ignore the scores: the advantages that the teacher adds are all (Thinking Machines Lab 2025, On-Policy Distillation)."""
    return Advantages(torch.zeros(inputs.rewards.shape, dtype=torch.float32))


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(student || teacher) at each drawn token: log pi_student - log pi_teacher, zero outside ``mask`` (k1).

    Minus this, as advantage, makes the policy gradient that of the reverse KL of a token's distribution, with discount 0 (Agarwal
    et al. 2023, arXiv 2306.13649, without the gradient through the sampling of earlier tokens; Gu et al. 2023, arXiv 2306.08543,
    eq. 4). It is zero in expectation exactly where student and teacher agree.

    Args:
        logprobs: [N] of the student that has drawn the tokens, over the whole vocabulary.
        teacher_logprobs: [N], at the same temperature.
        mask: [N] bool.
    """
    return kl_penalty(logprobs, teacher_logprobs, "k1", mask=mask)
