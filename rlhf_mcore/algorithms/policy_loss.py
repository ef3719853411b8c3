"""Policy-gradient losses: one function per paper, registered under its name in ``algorithm.policy_loss``.

Each takes a microbatch's tokens and returns the weighted *sum* of the token losses, and detached scalar *sums* over the trainable
tokens, which the caller divides by the global number of trainable tokens: ``clip_fraction_low`` and ``clip_fraction_high`` (tokens
at which the lower or upper bound acts), ``approx_kl`` (k3 of KL(old || new)) and ``importance_ratio``. Tokens outside of the mask
are replaced before any arithmetic, so NaN or inf in padding reaches neither loss nor gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import LossInputs, policy_loss
from rlhf_mcore.algorithms.kl import MAX_LOG_RATIO, at_least_float32, kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


@policy_loss("ppo_clip")
def ppo_clip(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective (PPO, arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 8).

    loss = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(logprobs_t - old_logprobs_t)

    With ``dual_clip`` c and a negative A_t the minimum is raised to at least c A_t (Ye et al. 2020, arXiv 1912.09729, eq. 5), and
    ``clip_fraction_dual`` counts those tokens. The log ratio is clamped to +-``MAX_LOG_RATIO`` (no gradient beyond), so that the
    one unclipped case, a negative advantage on a token that has become far more likely, stays finite.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    advantages = inputs.advantages
    surrogate = torch.minimum(ratio * advantages, clip_ratio(ratio, cfg) * advantages)
    metrics = clip_metrics(ratio, inputs, cfg)
    if cfg.dual_clip is not None:
        floor = torch.where(advantages < 0, cfg.dual_clip * advantages, surrogate)
        metrics["clip_fraction_dual"] = count((surrogate < floor) & inputs.mask)
        surrogate = torch.maximum(surrogate, floor)
    return weighted_sum(-surrogate, inputs.weights), metrics


def compute_log_ratio(inputs: LossInputs) -> Tensor:
    """Compute log r of every token, 0 for tokens that are not trainable.

    This selection also keeps garbage advantages out of the gradient: its backward pass drops theirs.
    """
    log_ratio = at_least_float32(inputs.logprobs) - at_least_float32(inputs.old_logprobs)
    return torch.where(inputs.mask, log_ratio, 0)


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_ratio(ratio: Tensor, cfg: AlgorithmConfig) -> Tensor:
    return ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)


@torch.no_grad()
def clip_metrics(ratio: Tensor, inputs: LossInputs, cfg: AlgorithmConfig) -> dict[str, Tensor]:
    """Compute the four sums of every loss. The clip fractions count tokens whose gradient a bound removes."""
    trainable = inputs.mask
    return {
        **ratio_metrics(ratio, inputs),
        "clip_fraction_low": count((ratio < 1.0 - cfg.clip_low) & (inputs.advantages < 0) & trainable),
        "clip_fraction_high": count((ratio > 1.0 + cfg.clip_high) & (inputs.advantages > 0) & trainable),
    }


@torch.no_grad()
def ratio_metrics(ratio: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """Compute the four sums of a loss that clips nothing."""
    nothing = ratio.new_zeros(())
    return {
        "clip_fraction_low": nothing,
        "clip_fraction_high": nothing,
        "approx_kl": kl_penalty(inputs.old_logprobs, inputs.logprobs, "k3", mask=inputs.mask).sum(),
        "importance_ratio": masked_sum(ratio, inputs.mask),
    }


def count(which: Tensor) -> Tensor:
    return which.sum().float()
