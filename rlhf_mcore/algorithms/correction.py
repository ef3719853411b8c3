"""Measure and correct the difference between the logprobs of the trainer and of the engine that sampled the tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.kl import MAX_LOG_RATIO, at_least_float32
from rlhf_mcore.algorithms.policy_loss import find_divergent

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows
    from rlhf_mcore.config.schema import RolloutCorrectionConfig


@torch.no_grad()
def rollout_ratio_statistics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, rows: OwnedRows
) -> dict[str, float]:
    """Compute the difference between old_logprobs and rollout_logprobs over the tokens in ``mask`` of all rows.

    Inputs are [N], for the rows that this rank owns. A NaN inside the mask is not hidden.

    Returns:
        ``logprob_diff_mean`` and ``logprob_diff_max``: mean and maximum of the absolute difference, 0 for an empty mask.
        ``logprob_exact``: the share of tokens with equal logprobs, bit for bit; 1 for an empty mask.
    """
    differences = (at_least_float32(old_logprobs) - at_least_float32(rollout_logprobs)).abs()
    count = rows.sums(torch.ones_like(differences), mask).sum().clamp(min=1)
    unequal = rows.sums(differences != 0, mask).sum()
    return {
        "logprob_exact": float(1 - unequal / count),
        "logprob_diff_mean": float(rows.sums(differences, mask).sum() / count),
        "logprob_diff_max": float(rows.extremes(differences, mask)[1].max()) if rows.num_rows else 0.0,
    }


RATIO_MODES = ("token", "sequence", "geometric")


def ratio_factors(log_ratio: Tensor, cfg: RolloutCorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ratio, the factor of the weight, and whether the ratio is in the band, for log rollout ratios of any shape."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if cfg.mode not in RATIO_MODES:
        return ratio, torch.ones_like(ratio), kept
    kept &= ratio >= cfg.mask_low if cfg.mask_low is not None else kept
    kept &= ratio <= cfg.mask_high if cfg.mask_high is not None else kept
    weight = torch.ones_like(ratio) if cfg.mode == "geometric" else ratio.clamp(max=cfg.cap)
    return ratio, torch.where(kept, weight, 0), kept


@torch.no_grad()
def factors_of_microbatch(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    cfg: RolloutCorrectionConfig,
) -> Tensor:
    """Return the factors of ``rollout_correction`` without staleness for a microbatch of whole sequences, in the same shape."""
    log_ratio = torch.where(mask, at_least_float32(old_logprobs) - at_least_float32(rollout_logprobs), 0)
    ids, of_tokens = sequence_ids.flatten(), log_ratio.flatten().double()
    zeros = torch.zeros(num_sequences, dtype=torch.float64, device=log_ratio.device)
    if cfg.mode in ("sequence", "geometric"):
        sums = zeros.index_add(0, ids, of_tokens)
        if cfg.mode == "geometric":
            sums /= zeros.index_add(0, ids, mask.flatten().double()).clamp(min=1)
        log_ratio = sums[sequence_ids].to(log_ratio.dtype)
    factor = ratio_factors(log_ratio, cfg)[1]
    if cfg.max_binary_kl is not None:
        factor = torch.where(find_divergent(old_logprobs, rollout_logprobs, cfg.max_binary_kl), 0, factor)
    if cfg.veto is not None:
        is_vetoed = zeros.scatter_reduce(0, ids, of_tokens, "amin") < math.log(cfg.veto)
        factor = torch.where(is_vetoed[sequence_ids], 0, factor)
    return factor


@torch.no_grad()
def staleness_factors(staleness: Tensor, loss_mask: Tensor, rows: OwnedRows, cfg: RolloutCorrectionConfig) -> Tensor:
    """Return [N] float32: 0 for tokens that ``rollout_correction`` masks as too stale, else 1. Collective if ``rows`` are."""
    return (loss_mask & ~_find_stale(staleness, loss_mask, rows, cfg)[0]).float()


def takes_part(cfg: RolloutCorrectionConfig, is_asynchronous: bool) -> bool:
    """Return whether any factor may differ from 1."""
    limits = (cfg.max_token_staleness, cfg.max_response_staleness)
    return cfg.mode in RATIO_MODES or (is_asynchronous and limits != (None, None))


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    rows: OwnedRows,
    cfg: RolloutCorrectionConfig,
    staleness: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute factors for the policy loss's token weights that correct the difference between the engine's and trainer's distribution.

    rho_t = exp(old_logprobs_t - rollout_logprobs_t) is the rollout ratio of a token. The factor depends on ``mode``:

    - ``token``: min(rho_t, cap), truncated importance sampling (Espeholt et al. 2018, IMPALA, arXiv 1802.01561, section 4.1;
      Ionides 2008);
    - ``sequence``: min(prod_t rho_t, cap) for all tokens of a response, the unbiased ratio except for the cap;
    - ``geometric``: 1. The band below applies to (prod_t rho_t)^(1 / length), which does not depend on the length;
    - ``off``: 1.

    If the engine samples from an older policy (the behaviour policy), a clipped loss with these factors is the decoupled objective
    (Hilton et al. 2022, arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, eq. 5). The loss clips around the proximal policy,
    which is the trainer's policy before the step's updates, with ``old_logprobs``. rho is the ratio of proximal to behaviour policy.

    The factor is 0 if the ratio before the cap is outside [mask_low, mask_high]. It is 0 for all tokens of a response that contains
    a ratio below ``veto`` (Liu et al. 2025, "When Speed Kills Stability", part 3). With ``token``, it is also 0 for a token whose
    divergence is above ``max_binary_kl`` (``policy_loss.py``). In every mode, it is 0 for tokens more than ``max_token_staleness``
    versions old, and for responses with a token more than ``max_response_staleness`` versions old. The counts that divide the loss do
    not change. As in verl, NeMo-RL and TRL, the factors apply only to the policy term; KL and entropy apply to every token. Log ratios
    are clamped to +-``MAX_LOG_RATIO``.

    Args:
        old_logprobs, rollout_logprobs: [N], for the rows that this rank owns.
        loss_mask: [N] bool; outside the mask the inputs are arbitrary and the factor is 0.
        rows: the rows that this rank owns.
        staleness: [N] int: number of versions between the policy that sampled a token and the policy of ``old_logprobs``; None in a
            synchronous run.

    Returns:
        [N] float32 factors, and statistics of the ratios of all rows, over tokens (``off``, ``token``) or responses (other modes):
        ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``clipped_fraction`` (above the cap, and not masked), ``masked_fraction`` (not
        in the band, divergent or vetoed) and ``effective_sample_size`` = (sum w)^2 / (n sum w^2) of the factors w, 1 if all are equal.
        For an empty mask, the fractions are 0 and the others 1. With ``staleness``, the statistics also contain ``staleness_mean``,
        ``staleness_max`` and ``stale_fraction`` (the share of tokens masked as too stale).
    """
    difference = at_least_float32(old_logprobs) - at_least_float32(rollout_logprobs)
    log_ratio, counted = torch.where(loss_mask, difference, 0), loss_mask
    is_vetoed = torch.zeros_like(loss_mask)
    if cfg.veto is not None:
        is_vetoed = rows.to_tokens(rows.extremes(log_ratio, loss_mask)[0] < math.log(cfg.veto))
    if cfg.mode in ("sequence", "geometric"):
        # Every token of a row has the same ratio, so only the last token counts.
        sums = rows.local_sums(log_ratio, loss_mask)
        if cfg.mode == "geometric":
            sums /= rows.local_sums(torch.ones_like(log_ratio), loss_mask).clamp(min=1)
        log_ratio = rows.to_tokens(sums.to(log_ratio.dtype))
        counted = rows.last(loss_mask)
    ratio, factor, kept = ratio_factors(log_ratio, cfg)
    is_left_out = is_vetoed
    if cfg.max_binary_kl is not None:
        is_left_out = is_vetoed | find_divergent(old_logprobs, rollout_logprobs, cfg.max_binary_kl)
    kept, factor = kept & ~is_left_out, torch.where(is_left_out, 0, factor)
    is_capped = (ratio > cfg.cap) & kept if cfg.mode in ("token", "sequence") else torch.zeros_like(kept)
    ages: dict[str, float] = {}
    if staleness is not None:
        is_stale, ages = _find_stale(staleness, loss_mask, rows, cfg)
        factor = torch.where(is_stale, 0, factor)
    factor = torch.where(loss_mask, factor, 0)
    return factor, _summarize(ratio, factor, kept, is_capped, counted, rows) | ages


def _find_stale(
    staleness: Tensor, loss_mask: Tensor, rows: OwnedRows, cfg: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return which tokens [N] are masked as too stale, and statistics over all rows."""
    newest, oldest = rows.extremes(staleness, loss_mask)
    assert not (newest < 0).any(), "a token has a newer policy version than the trainer"
    is_stale = torch.zeros_like(loss_mask)
    if cfg.max_token_staleness is not None:
        is_stale |= staleness > cfg.max_token_staleness
    if cfg.max_response_staleness is not None:
        is_stale |= rows.to_tokens(oldest) > cfg.max_response_staleness
    count = rows.sums(torch.ones_like(staleness), loss_mask).sum().clamp(min=1)
    return is_stale, {
        "staleness_mean": float(rows.sums(staleness, loss_mask).sum() / count),
        "staleness_max": float(oldest.max()) if rows.num_rows else 0.0,
        "stale_fraction": float(rows.sums(is_stale, loss_mask).sum() / count),
    }


def _summarize(
    ratio: Tensor, factor: Tensor, kept: Tensor, is_capped: Tensor, counted: Tensor, rows: OwnedRows
) -> dict[str, float]:
    """Return statistics over the positions in ``counted`` [N] of all ranks."""

    def total(values: Tensor) -> float:
        return float(rows.sums(values.double(), counted).sum())

    per_row = rows.sums(torch.ones_like(ratio), counted)
    count = float(per_row.sum())
    if not count:
        ones = dict.fromkeys(("ratio_mean", "ratio_max", "ratio_min", "effective_sample_size"), 1.0)
        return {**ones, "clipped_fraction": 0.0, "masked_fraction": 0.0}
    smallest, largest = (extremes[per_row > 0] for extremes in rows.extremes(ratio, counted))
    squares = total(factor.double().square()) / count
    return {
        "ratio_mean": total(ratio) / count,
        "ratio_max": float(largest.max()),
        "ratio_min": float(smallest.min()),
        "clipped_fraction": total(is_capped) / count,
        "masked_fraction": total(~kept) / count,
        "effective_sample_size": (total(factor) / count) ** 2 / squares if squares > 0 else 0.0,
    }
