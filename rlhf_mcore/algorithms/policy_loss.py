"""Policy-gradient losses: per-token logprobs and weights in, a weighted sum and metrics out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.kl import MAX_LOG_RATIO, at_least_float32, kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective (PPO, arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 8).

    loss = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(logprobs_t - old_logprobs_t)

    The log ratio is clamped to +-``MAX_LOG_RATIO`` (no gradient beyond), so that the one unclipped case, a negative
    advantage on a token that has become far more likely, stays finite. Tokens of weight 0 are replaced before any
    arithmetic: NaN or inf in padding reaches neither the loss nor the gradient.

    Args:
        logprobs: current, differentiable; padded [B, T] or packed [1, N].
        old_logprobs, advantages: same shape, constants.
        weights: same shape, from :func:`~rlhf_mcore.algorithms.masking.token_weights`; > 0 marks trainable tokens.

    Returns:
        The scalar loss share of these tokens, and detached scalar *sums* over the trainable tokens; after reducing
        them over microbatches and ranks the caller divides by the global number of trainable tokens:
        ``clip_fraction_low`` and ``clip_fraction_high`` (tokens whose gradient the lower or upper bound removes),
        ``approx_kl`` (k3 of KL(old || new)), ``importance_ratio``.
    """
    trainable = weights > 0
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    # This one selection also keeps garbage advantages out of the gradient: its backward drops whatever arrives there.
    log_ratio = torch.where(trainable, log_ratio, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = weighted_sum(-torch.minimum(ratio * advantages, clipped * advantages), weights)

    with torch.no_grad():
        metrics = {
            "clip_fraction_low": ((ratio < 1.0 - clip_low) & (advantages < 0)).sum().float(),
            "clip_fraction_high": ((ratio > 1.0 + clip_high) & (advantages > 0)).sum().float(),
            "approx_kl": kl_penalty(old_logprobs, logprobs, "k3", mask=trainable).sum(),
            "importance_ratio": masked_sum(ratio, trainable),
        }
    return loss, metrics
