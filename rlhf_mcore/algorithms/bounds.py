"""Policy losses that bound ratios in other ways than PPO: of whole responses, as a constant, or by a sigmoid. See ``policy_loss``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import LossInputs, policy_loss
from rlhf_mcore.algorithms.kl import at_least_float32
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.algorithms.policy_loss import (
    bound_log_ratio,
    clip_metrics,
    clip_ratio,
    compute_log_ratio,
    count,
    ratio_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


@policy_loss("gspo")
def gspo(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Bound one ratio for the whole response: GSPO in its token form (Zheng et al. 2025, arXiv 2507.18071, eq. 13-14).

    loss = -sum_t w_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    s_t = sg[s] exp(logprobs_t - sg[logprobs_t]),   s = exp(mean over the response's tokens of logprobs - old_logprobs)

    Every token's s_t has the value of s and the gradient of its own logprob. With one advantage per response and
    ``loss_aggregation: sequence`` loss and gradient are those of eq. 5; other weights and per-token advantages are possible too.
    The mean is over all trainable tokens, also those that the rollout correction masks. Metrics count tokens: a clipped response
    counts with all of its tokens.
    """
    # Only the sequence's log ratio is bounded: every token's enters it unclamped, and has a gradient.
    log_ratio = compute_log_ratio(inputs)
    means = _sequence_means(log_ratio.detach(), inputs)
    # The difference is 0 and carries only the gradient.
    ratio = bound_log_ratio(means + (log_ratio - log_ratio.detach())).exp()
    surrogate = torch.minimum(ratio * inputs.advantages, clip_ratio(ratio, cfg) * inputs.advantages)
    return weighted_sum(-surrogate, inputs.weights), clip_metrics(ratio, inputs, cfg)


@policy_loss("cispo")
def cispo(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Use the ratio as a clipped constant in front of the logprob (CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    loss = -sum_t w_t sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t

    No token loses its gradient. ``clip_low: 1`` is no lower bound, as in the paper. The clip fractions count every token at
    a bound, whatever the sign of its advantage.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp().detach()
    logprobs = torch.where(inputs.mask, at_least_float32(inputs.logprobs), 0)
    loss = weighted_sum(-clip_ratio(ratio, cfg) * inputs.advantages * logprobs, inputs.weights)
    metrics = clip_metrics(ratio, inputs, cfg)
    metrics["clip_fraction_low"] = count((ratio < 1.0 - cfg.clip_low) & inputs.mask)
    metrics["clip_fraction_high"] = count((ratio > 1.0 + cfg.clip_high) & inputs.mask)
    return loss, metrics


@policy_loss("gmpo")
def gmpo(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the geometric mean of a response's clipped ratios: GMPO (Zhao et al. 2025, arXiv 2507.20673, eq. 4).

    loss = -sum_t w_t s_t A_t,   s_t = sg[s] exp(l_t - sg[l_t]),   s = exp(mean over the response's tokens of l)
    l_t = sgn(A_t) min(sgn(A_t) log r_t, sgn(A_t) clip(log r_t, -clip_low, clip_high))

    The bounds are those of log r. Every token's s_t has the value of s and the gradient of its own logprob, as in :func:`gspo`:
    with one advantage per response and ``loss_aggregation: sequence`` loss and gradient are the paper's.
    """
    log_ratio = compute_log_ratio(inputs)
    sign = torch.where(inputs.mask, inputs.advantages.sign(), 0)
    bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-cfg.clip_low, cfg.clip_high))
    ratio = bound_log_ratio(_sequence_means(bounded.detach(), inputs) + (bounded - bounded.detach())).exp()
    metrics = ratio_metrics(ratio, inputs)
    metrics["clip_fraction_low"] = count((log_ratio < -cfg.clip_low) & (sign < 0))
    metrics["clip_fraction_high"] = count((log_ratio > cfg.clip_high) & (sign > 0))
    return weighted_sum(-ratio * inputs.advantages, inputs.weights), metrics


@policy_loss("sapo")
def sapo(inputs: LossInputs, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Fade tokens out by a sigmoid of their ratio, in the place of a bound: SAPO (Gao et al. 2025, arXiv 2511.20347, eq. 5-6).

    loss = -sum_t w_t (4 / tau) sigmoid(tau (r_t - 1)) A_t,   tau = ``sapo.tau_positive`` where A_t > 0, else ``sapo.tau_negative``

    At r = 1 the gradient is that of r_t A_t. The clip fractions are 0: nothing is clipped.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    tau = torch.where(inputs.advantages > 0, cfg.sapo.tau_positive, cfg.sapo.tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return weighted_sum(-gate * inputs.advantages, inputs.weights), ratio_metrics(ratio, inputs)


def _sequence_means(values: Tensor, inputs: LossInputs) -> Tensor:
    """Average ``values`` over the trainable tokens of each sequence. Each position gets the mean of its sequence."""
    ids, trainable = inputs.sequence_ids.flatten(), inputs.mask.flatten()
    zeros = values.new_zeros(inputs.num_sequences)
    sums = zeros.index_add(0, ids, torch.where(trainable, values.flatten(), 0))
    counts = zeros.index_add(0, ids, trainable.to(values.dtype))
    return (sums / counts.clamp(min=1))[inputs.sequence_ids]
