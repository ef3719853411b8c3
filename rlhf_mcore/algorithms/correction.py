"""How far the trainer's logprobs are from those of the engine that sampled the tokens, and what is done about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.kl import MAX_LOG_RATIO, at_least_float32

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import RolloutCorrectionConfig


@torch.no_grad()
def rollout_ratio_statistics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Statistics of |log rollout_ratio| = |old_logprobs - rollout_logprobs| over the tokens in ``mask``.

    All three inputs have one shape. The results are local float scalars, zero for an empty mask: the caller adds
    ``logprob_diff_sum`` and ``num_tokens`` over ranks and takes the largest ``logprob_diff_max``. A NaN inside the
    mask shows.
    """
    differences = (at_least_float32(old_logprobs[mask]) - at_least_float32(rollout_logprobs[mask])).abs()
    return {
        "logprob_diff_sum": differences.sum(),
        "logprob_diff_max": differences.max() if differences.numel() else differences.new_zeros(()),
        "num_tokens": differences.new_tensor(differences.numel()),
    }


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cfg: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Factors of the policy loss's token weights that make up for the engine sampling from another distribution than the trainer's.

    With the rollout ratio rho_t = exp(old_logprobs_t - rollout_logprobs_t) of a token, for ``mode``

    - ``token``: min(rho_t, cap): truncated importance sampling (Espeholt et al. 2018, IMPALA, arXiv 1802.01561, section 4.1;
      Ionides 2008);
    - ``sequence``: min(prod_t rho_t, cap) for all tokens of a response, the unbiased ratio but for the cap;
    - ``off``: 1.

    Where the ratio, before the cap, is outside of [mask_low, mask_high] the factor is 0. The counts by which a loss is divided stay.
    As in verl, NeMo-RL and TRL the factors are of the policy term alone: KL and entropy hold the policy back on every token.
    Log ratios are clamped to +-``MAX_LOG_RATIO``.

    Args:
        old_logprobs, rollout_logprobs: [B, T].
        loss_mask: [B, T] bool; outside of it the inputs may be anything and the factor is 0.

    Returns:
        [B, T] float32 factors, and statistics of the ratios, of tokens (``off``, ``token``) or responses (``sequence``):
        ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``clipped_fraction`` (above the cap, and not masked), ``masked_fraction`` and
        ``effective_sample_size`` = (sum w)^2 / (n sum w^2) of the factors w, 1 where all are equal. Empty masks give ones, and
        fractions of 0.
    """
    difference = at_least_float32(old_logprobs) - at_least_float32(rollout_logprobs)
    log_ratio = torch.where(loss_mask, difference, 0)
    if cfg.mode == "sequence":
        log_ratio, counted = log_ratio.sum(1, keepdim=True), loss_mask.any(1, keepdim=True)
    else:
        counted = loss_mask
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if cfg.mode != "off":
        kept &= ratio >= cfg.mask_low if cfg.mask_low is not None else kept
        kept &= ratio <= cfg.mask_high if cfg.mask_high is not None else kept
    factor = torch.where(kept, ratio.clamp(max=cfg.cap), 0) if cfg.mode != "off" else torch.ones_like(ratio)
    statistics = _statistics(ratio[counted].double(), factor[counted].double(), kept[counted], cfg)
    return torch.where(loss_mask, factor, 0), statistics


def _statistics(ratio: Tensor, factor: Tensor, kept: Tensor, cfg: RolloutCorrectionConfig) -> dict[str, float]:
    if ratio.numel() == 0:
        ratio, factor, kept = ratio.new_ones(1), factor.new_ones(1), kept.new_ones(1)
    squares = factor.square().mean()
    capped = (ratio > cfg.cap) & kept if cfg.mode != "off" else torch.zeros_like(kept)
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
        "clipped_fraction": float(capped.double().mean()),
        "masked_fraction": float((~kept).double().mean()),
        "effective_sample_size": float(factor.mean().square() / squares) if squares > 0 else 0.0,
    }
