"""Divergence of the probabilities that two policies give a sampled token, where all other tokens are one other outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import LossInputs, policy_loss
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.algorithms.policy_loss import bound_log_ratio, compute_log_ratio, count, ratio_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig

# Logprobs of float32 do not tell probabilities apart that are closer to 1.
_CERTAIN = 1e-6


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) of two outcomes, the sampled token or another, from probabilities of the token.

    D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). It is infinite where q is certain of what p is not.
    """
    others = torch.special.xlogy(1 - p, 1 - p) - torch.special.xlogy(1 - p, 1 - q)
    return torch.special.xlogy(p, p) - torch.special.xlogy(p, q) + others


def find_divergent(old_logprobs: Tensor, rollout_logprobs: Tensor, bound: float) -> Tensor:
    """Return in which tokens trainer and engine are too far apart: KPop (Guo et al. 2026, Ant Group, ringtech.notion.site/kpop).

    max(D(p || q), D(q || p)) > bound, with the trainer's and the engine's probability p and q of the sampled token and the divergence
    D of two outcomes, :func:`binary_kl`. A band of ratios is equally wide for all tokens. This one is wider
    for a rare token and narrower for a likely one. Probabilities are held between 1e-6 and 1 - 1e-6, as in prime-rl: else a token
    whose logprob is rounded to 0 on one side alone would be infinitely far.

    Args:
        old_logprobs, rollout_logprobs: any shape, of the trainer before the step's updates and of the engine.
    """
    p, q = (values.double().exp().clamp(_CERTAIN, 1 - _CERTAIN) for values in (old_logprobs, rollout_logprobs))
    return torch.maximum(binary_kl(p, q), binary_kl(q, p)) > bound


@policy_loss("dppo_tv")
def dppo_tv(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Leave out tokens by the total variation of their probability: DPPO-Binary-TV (Qi et al. 2026, arXiv 2602.04879).

    loss = -sum_t w_t M_t r_t A_t,   M_t = 0 where A_t > 0 and p - q > clip_high, or A_t < 0 and q - p > clip_low, else 1

    p and q are the current and the old probability of the sampled token. Unlike a bound of the ratio, this one holds rare tokens
    less and frequent ones more. The clip fractions count tokens that are left out.
    """
    new, old = _probabilities(inputs)
    return _mask_divergence(inputs, too_high=new - old > cfg.clip_high, too_low=old - new > cfg.clip_low)


@policy_loss("dppo_kl")
def dppo_kl(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Leave out tokens by the KL divergence of their probability: DPPO-Binary-KL (Qi et al. 2026, arXiv 2602.04879).

    As :func:`dppo_tv`, where q log(q / p) + (1 - q) log((1 - q) / (1 - p)), the divergence of two outcomes, the sampled token or
    another, is above ``clip_high`` for a token that has become more likely, or above ``clip_low`` for one that has become less likely.
    """
    new, old = _probabilities(inputs)
    divergence = binary_kl(old, new)
    return _mask_divergence(
        inputs,
        too_high=(new > old) & (divergence > cfg.clip_high),
        too_low=(new < old) & (divergence > cfg.clip_low),
    )


@torch.no_grad()
def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return current and old probabilities of the sampled tokens in float64, 1 outside of the mask."""
    new, old = (torch.where(inputs.mask, values.double(), 0).exp() for values in (inputs.logprobs, inputs.old_logprobs))
    return new, old


def _mask_divergence(inputs: LossInputs, too_high: Tensor, too_low: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum -r_t A_t but for tokens that go on in the direction in which they are too far already."""
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    high, low = too_high & (inputs.advantages > 0), too_low & (inputs.advantages < 0)
    surrogate = torch.where(high | low, 0, ratio * inputs.advantages)
    metrics = ratio_metrics(ratio, inputs)
    metrics["clip_fraction_low"] = count(low & inputs.mask)
    metrics["clip_fraction_high"] = count(high & inputs.mask)
    return weighted_sum(-surrogate, inputs.weights), metrics
