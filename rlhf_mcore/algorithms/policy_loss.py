"""Policy-gradient losses: one function per paper, registered under its name in ``algorithm.policy_loss``.

Each function takes the tokens of a microbatch, and the settings that ``takes`` declares as keyword arguments. It returns the weighted
*sum* of the token losses, and detached scalar *sums* over the trainable tokens. The caller divides these by the global number of
trainable tokens. The sums are ``clip_fraction_low`` and ``clip_fraction_high`` (tokens at which the lower or upper bound acts),
``approx_kl`` (k3 of KL(old || new)) and ``importance_ratio``. Tokens outside the mask are replaced before any arithmetic, so NaN or
inf in padding does not reach the loss or the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import LossInputs, policy_loss, takes
from rlhf_mcore.algorithms.kl import MAX_LOG_RATIO, at_least_float32, kl_penalty
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("ppo_clip")
@takes("clip_low", "clip_high", "dual_clip")
def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the clipped surrogate objective (PPO, arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, eq. 8).

    loss = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   r_t = exp(logprobs_t - old_logprobs_t)

    With ``dual_clip`` c and a negative A_t, the minimum is raised to at least c A_t (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    ``clip_fraction_dual`` counts these tokens. The log ratio is clamped to +-``MAX_LOG_RATIO``, without a gradient beyond. This keeps
    the only unclipped case finite: a negative advantage of a token that has become far more likely.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    advantages = inputs.advantages
    surrogate = torch.minimum(ratio * advantages, clip_ratio(ratio, clip_low, clip_high) * advantages)
    metrics = clip_metrics(ratio, inputs, clip_low, clip_high)
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, surrogate)
        metrics["clip_fraction_dual"] = count((surrogate < floor) & inputs.mask)
        surrogate = torch.maximum(surrogate, floor)
    return weighted_sum(-surrogate, inputs.weights), metrics


def compute_log_ratio(inputs: LossInputs) -> Tensor:
    """Compute log r of every token, 0 for tokens that are not trainable.

    The selection also keeps invalid advantages of other tokens out of the gradient, because its backward pass drops them.
    """
    log_ratio = at_least_float32(inputs.logprobs) - at_least_float32(inputs.old_logprobs)
    return torch.where(inputs.mask, log_ratio, 0)


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_ratio(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ratio.clamp(1.0 - clip_low, 1.0 + clip_high)


@torch.no_grad()
def clip_metrics(ratio: Tensor, inputs: LossInputs, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Compute the four sums of a clipped loss. The clip fractions count tokens whose gradient a bound removes."""
    trainable = inputs.mask
    return {
        **ratio_metrics(ratio, inputs),
        "clip_fraction_low": count((ratio < 1.0 - clip_low) & (inputs.advantages < 0) & trainable),
        "clip_fraction_high": count((ratio > 1.0 + clip_high) & (inputs.advantages > 0) & trainable),
    }


@torch.no_grad()
def ratio_metrics(ratio: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    """Compute the four sums of a loss without clipping."""
    nothing = ratio.new_zeros(())
    return {
        "clip_fraction_low": nothing,
        "clip_fraction_high": nothing,
        "approx_kl": kl_penalty(inputs.old_logprobs, inputs.logprobs, "k3", mask=inputs.mask).sum(),
        "importance_ratio": masked_sum(ratio, inputs.mask),
    }


def count(which: Tensor) -> Tensor:
    return which.sum().float()


@policy_loss("gspo")
@takes("clip_low", "clip_high")
def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip a single ratio for the whole response: GSPO in its token form (Zheng et al. 2025, arXiv 2507.18071, eq. 13-14).

    loss = -sum_t w_t min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    s_t = sg[s] exp(logprobs_t - sg[logprobs_t]),   s = exp(mean over the response's tokens of logprobs - old_logprobs)

    Every token's s_t has the value of s and the gradient of its own logprob. With one advantage per response and
    ``loss_aggregation: sequence``, loss and gradient equal eq. 5. Other weights and per-token advantages are possible too. The mean
    includes all trainable tokens, even tokens that the rollout correction masks. Metrics count tokens, so a clipped response counts
    with all its tokens.
    """
    # Only the log ratio of the sequence is bounded. The log ratios of tokens are not, so that every token has a gradient.
    log_ratio = compute_log_ratio(inputs)
    means = _sequence_means(log_ratio.detach(), inputs)
    # The difference is 0 and carries only the gradient.
    ratio = bound_log_ratio(means + (log_ratio - log_ratio.detach())).exp()
    surrogate = torch.minimum(ratio * inputs.advantages, clip_ratio(ratio, clip_low, clip_high) * inputs.advantages)
    return weighted_sum(-surrogate, inputs.weights), clip_metrics(ratio, inputs, clip_low, clip_high)


@policy_loss("cispo")
@takes("clip_low", "clip_high")
def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Use the clipped ratio as a constant factor of the logprob: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    loss = -sum_t w_t sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t

    No token loses its gradient. ``clip_low: 1`` means no lower bound, as in the paper. The clip fractions count every token at a
    bound, regardless of the sign of its advantage.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp().detach()
    logprobs = torch.where(inputs.mask, at_least_float32(inputs.logprobs), 0)
    loss = weighted_sum(-clip_ratio(ratio, clip_low, clip_high) * inputs.advantages * logprobs, inputs.weights)
    metrics = clip_metrics(ratio, inputs, clip_low, clip_high)
    metrics["clip_fraction_low"] = count((ratio < 1.0 - clip_low) & inputs.mask)
    metrics["clip_fraction_high"] = count((ratio > 1.0 + clip_high) & inputs.mask)
    return loss, metrics


@policy_loss("gmpo")
@takes("clip_low", "clip_high")
def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Use the geometric mean of a response's clipped ratios: GMPO (Zhao et al. 2025, arXiv 2507.20673, eq. 4).

    loss = -sum_t w_t s_t A_t,   s_t = sg[s] exp(l_t - sg[l_t]),   s = exp(mean over the response's tokens of l)
    l_t = sgn(A_t) min(sgn(A_t) log r_t, sgn(A_t) clip(log r_t, -clip_low, clip_high))

    The bounds apply to log r. Every token's s_t has the value of s and the gradient of its own logprob, as in :func:`gspo`. With one
    advantage per response and ``loss_aggregation: sequence``, loss and gradient equal the paper's.
    """
    log_ratio = compute_log_ratio(inputs)
    sign = torch.where(inputs.mask, inputs.advantages.sign(), 0)
    bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    ratio = bound_log_ratio(_sequence_means(bounded.detach(), inputs) + (bounded - bounded.detach())).exp()
    metrics = ratio_metrics(ratio, inputs)
    metrics["clip_fraction_low"] = count((log_ratio < -clip_low) & (sign < 0))
    metrics["clip_fraction_high"] = count((log_ratio > clip_high) & (sign > 0))
    return weighted_sum(-ratio * inputs.advantages, inputs.weights), metrics


@policy_loss("sapo")
@takes("sapo.tau_positive", "sapo.tau_negative")
def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduce the gradient smoothly by a sigmoid of the ratio, instead of clipping: SAPO (Gao et al. 2025, arXiv 2511.20347, eq. 5-6).

    loss = -sum_t w_t (4 / tau) sigmoid(tau (r_t - 1)) A_t,   tau = ``tau_positive`` if A_t > 0, else ``tau_negative``

    At r = 1 the gradient equals the gradient of r_t A_t. The clip fractions are 0, because nothing is clipped.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    tau = torch.where(inputs.advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return weighted_sum(-gate * inputs.advantages, inputs.weights), ratio_metrics(ratio, inputs)


def _sequence_means(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return, at each position, the mean of ``values`` over the trainable tokens of its sequence."""
    ids, trainable = inputs.sequence_ids.flatten(), inputs.mask.flatten()
    zeros = values.new_zeros(inputs.num_sequences)
    sums = zeros.index_add(0, ids, torch.where(trainable, values.flatten(), 0))
    counts = zeros.index_add(0, ids, trainable.to(values.dtype))
    return (sums / counts.clamp(min=1))[inputs.sequence_ids]


# float32 logprobs cannot distinguish probabilities closer to 1 than this.
_CERTAIN = 1e-6


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) over two outcomes (the sampled token, or any other token) from the probabilities of the token.

    D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). It is infinite if q is 0 or 1 and p is not equal to q.
    """
    others = torch.special.xlogy(1 - p, 1 - p) - torch.special.xlogy(1 - p, 1 - q)
    return torch.special.xlogy(p, p) - torch.special.xlogy(p, q) + others


def find_divergent(old_logprobs: Tensor, rollout_logprobs: Tensor, bound: float) -> Tensor:
    """Mark tokens whose probabilities in trainer and engine differ too much: KPop (Guo et al. 2026, Ant Group,
    ringtech.notion.site/kpop).

    max(D(p || q), D(q || p)) > bound, with the sampled token's probability p in the trainer and q in the engine, and the divergence D
    of two outcomes, :func:`binary_kl`. A band of ratios is equally wide for all tokens. This band is wider for a rare token and
    narrower for a likely token. Probabilities are clamped to [1e-6, 1 - 1e-6], as in prime-rl. Otherwise a token whose logprob is
    rounded to 0 on only one side would have an infinite divergence.

    Args:
        old_logprobs, rollout_logprobs: logprobs of the trainer before the step's updates, and of the engine; any shape.
    """
    p, q = (values.double().exp().clamp(_CERTAIN, 1 - _CERTAIN) for values in (old_logprobs, rollout_logprobs))
    return torch.maximum(binary_kl(p, q), binary_kl(q, p)) > bound


@policy_loss("dppo_tv")
@takes("clip_low", "clip_high")
def dppo_tv(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask tokens by the total variation of their probability: DPPO-Binary-TV (Qi et al. 2026, arXiv 2602.04879).

    loss = -sum_t w_t M_t r_t A_t,   M_t = 0 if A_t > 0 and p - q > clip_high, or A_t < 0 and q - p > clip_low, else 1

    p and q are the current and the old probability of the sampled token. Compared with a bound on the ratio, this bound restricts rare
    tokens less and frequent tokens more. The clip fractions count masked tokens.
    """
    new, old = _probabilities(inputs)
    return _mask_divergence(inputs, too_high=new - old > clip_high, too_low=old - new > clip_low)


@policy_loss("dppo_kl")
@takes("clip_low", "clip_high")
def dppo_kl(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Mask tokens by the KL divergence of their probability: DPPO-Binary-KL (Qi et al. 2026, arXiv 2602.04879).

    The loss is the same as for :func:`dppo_tv`, with another mask. It uses the divergence of two outcomes, the sampled token or any
    other token: q log(q / p) + (1 - q) log((1 - q) / (1 - p)). M_t is 0 if the divergence is above ``clip_high`` for a token that has
    become more likely (A_t > 0), or above ``clip_low`` for a token that has become less likely (A_t < 0).
    """
    new, old = _probabilities(inputs)
    divergence = binary_kl(old, new)
    return _mask_divergence(
        inputs,
        too_high=(new > old) & (divergence > clip_high),
        too_low=(new < old) & (divergence > clip_low),
    )


@torch.no_grad()
def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return current and old probabilities of the sampled tokens in float64, 1 outside the mask."""
    new, old = (torch.where(inputs.mask, values.double(), 0).exp() for values in (inputs.logprobs, inputs.old_logprobs))
    return new, old


def _mask_divergence(inputs: LossInputs, too_high: Tensor, too_low: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum -r_t A_t without tokens that would move further in the direction in which they are already too far."""
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    high, low = too_high & (inputs.advantages > 0), too_low & (inputs.advantages < 0)
    surrogate = torch.where(high | low, 0, ratio * inputs.advantages)
    metrics = ratio_metrics(ratio, inputs)
    metrics["clip_fraction_low"] = count(low & inputs.mask)
    metrics["clip_fraction_high"] = count(high & inputs.mask)
    return weighted_sum(-surrogate, inputs.weights), metrics
