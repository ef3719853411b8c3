"""Losses that limit updates on the few tokens with a high covariance of logprob and advantage, which reduce the entropy.

Both losses are from Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv
2505.22617, section 4). :func:`choose_tokens` marks these tokens before the updates, because covariance and share refer to a whole
minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import LossInputs, policy_loss, reads, takes
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.algorithms.policy_loss import (
    bound_log_ratio,
    clip_metrics,
    clip_ratio,
    compute_log_ratio,
    ratio_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows
    from rlhf_mcore.types import TrainBatch

CHOSEN = "high_covariance"  # the field [N] bool that both losses read


@policy_loss("kl_cov")
@reads(CHOSEN)
@takes("covariance.kl_coef")
def kl_cov(inputs: LossInputs, *, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Penalise the distance from the old policy for tokens with the largest covariance: KL-Cov (arXiv 2505.22617, eq. 12-13).

    loss = -sum_t w_t (r_t A_t - [t in I] kl_coef |log r_t|)

    I contains the share ``covariance.share`` of the minibatch's tokens, with the largest covariances. No ratio is clipped. |log r| is
    the estimate of the KL divergence in the authors' code.
    """
    log_ratio = bound_log_ratio(compute_log_ratio(inputs))
    ratio = log_ratio.exp()
    penalty = torch.where(_choose_tokens(inputs), kl_coef * log_ratio.abs(), 0)
    return weighted_sum(penalty - ratio * inputs.advantages, inputs.weights), ratio_metrics(ratio, inputs)


@policy_loss("clip_cov")
@reads(CHOSEN)
@takes("clip_low", "clip_high")
def clip_cov(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Exclude a few tokens with high covariance: Clip-Cov (arXiv 2505.22617, eq. 10-11).

    loss = -sum_t w_t [t not in I] min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    I contains at most the share ``covariance.share`` of the minibatch's tokens. They are sampled at random from the tokens whose
    covariance is between ``covariance.low`` and ``covariance.high``. The clip fractions also count tokens of I: the upper fraction
    tokens with A_t > 0, the lower fraction tokens with A_t < 0.
    """
    ratio = bound_log_ratio(compute_log_ratio(inputs)).exp()
    chosen = _choose_tokens(inputs)
    surrogate = torch.minimum(ratio * inputs.advantages, clip_ratio(ratio, clip_low, clip_high) * inputs.advantages)
    metrics = clip_metrics(ratio, inputs, clip_low, clip_high)
    is_inside = (ratio >= 1.0 - clip_low) & (ratio <= 1.0 + clip_high) & chosen
    metrics["clip_fraction_low"] += (is_inside & (inputs.advantages < 0)).sum()
    metrics["clip_fraction_high"] += (is_inside & (inputs.advantages > 0)).sum()
    return weighted_sum(torch.where(chosen, 0, -surrogate), inputs.weights), metrics


def _choose_tokens(inputs: LossInputs) -> Tensor:
    chosen = inputs.fields[CHOSEN]
    assert isinstance(chosen, torch.Tensor)
    return chosen & inputs.mask


def choose_tokens(
    batch: TrainBatch,
    minibatches: Sequence[Sequence[int]],
    rows: OwnedRows,
    share: float,
    band: tuple[float, float] | None = None,
) -> Tensor:
    """Mark the tokens I of both losses for each minibatch: [N] bool. Collective if ``rows`` are.

    The logprobs come from the policy before the step's updates. The result does not depend on which rank owns which row.

    Args:
        minibatches: the rows of each minibatch, on every rank.
        share: share of the tokens of each minibatch.
        band: lowest and highest covariance of the tokens that :func:`clip_cov` samples from. None: choose the tokens with the largest
            covariances, for :func:`kl_cov`.
    """
    assert batch.old_logprobs is not None and batch.advantages is not None
    chosen = torch.zeros_like(batch.loss_mask)
    for members in minibatches:
        is_member = torch.zeros(rows.num_rows, dtype=torch.bool)
        is_member[list(members)] = True
        mask = batch.loss_mask & rows.to_tokens(is_member)
        num_tokens = int(batch.num_sampled[is_member].sum())
        count = max(int(share * num_tokens), 1)
        covariances = token_covariances(batch.old_logprobs, batch.advantages, mask, rows)
        if band is None:
            chosen |= choose_largest(covariances, mask, count, rows)
        else:
            low, high = band
            in_band = mask & (covariances > low) & (covariances < high)
            chosen |= choose_largest(_random_numbers(rows, batch.policy_version), in_band, count, rows)
    return chosen


def token_covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, rows: OwnedRows) -> Tensor:
    """Compute (log p_t - mean log p) (A_t - mean A) over the tokens of all rows in the mask (arXiv 2505.22617, eq. 9).

    Returns:
        [N] float64, zero outside the mask.
    """
    count = rows.sums(torch.ones_like(logprobs), mask).sum().clamp(min=1)
    covariances = mask.double()
    for values in (logprobs, advantages):
        deviations = values.double() - rows.sums(values, mask).sum() / count
        covariances *= torch.where(mask, deviations, 0)
    return covariances


def choose_largest(values: Tensor, mask: Tensor, count: int, rows: OwnedRows) -> Tensor:
    """Mark the ``count`` largest values in the mask over all rows, or all if there are fewer: [N] bool.

    Among equal values, the first in the order of rows and tokens are marked. Ranks find the smallest marked value by bisecting the
    range of float64 numbers, and exchange only counts.

    Args:
        values: [N] float64, for the rows that this rank owns.
    """
    ones, order = torch.ones_like(values), _order(values)

    def number_of(which: Tensor) -> int:
        return int(rows.sums(ones, which).sum())

    if number_of(mask) <= count:
        return mask.clone()
    # Invariant: at least ``count`` values are not below ``low``, and fewer are not below ``high``.
    low, high = -(2**63), 2**63 - 1
    while high - low > 1:
        middle = (low + high) // 2
        number = number_of(mask & (order >= middle))
        if number == count:
            return mask & (order >= middle)
        low, high = (middle, high) if number > count else (low, middle)
    larger, equal = mask & (order > low), mask & (order == low)
    per_row = rows.sums(ones, equal)
    left = (count - number_of(larger) - (per_row.cumsum(0) - per_row)).clamp(min=0)
    own = rows.local_sums(ones, equal)
    place = equal.cumsum(0) - 1 - rows.to_tokens(own.cumsum(0) - own)
    return larger | (equal & (place < rows.to_tokens(left)))


def _order(values: Tensor) -> Tensor:
    """Return integers [N] int64 in the order of float64 values."""
    bits = (values + 0.0).view(torch.int64)  # -0 becomes 0
    return torch.where(bits < 0, bits ^ (2**63 - 1), bits)


def _random_numbers(rows: OwnedRows, step: int) -> Tensor:
    """Sample a number from 0 to 1 for each token of this rank's rows: [N] float64. It does not depend on which rank owns a row."""
    generator, drawn = torch.Generator(), []
    for row in rows.rows.tolist():
        generator.manual_seed(step * rows.num_rows + row)  # the generator uses only 32 bits of the seed
        drawn.append(torch.rand(int(rows.lengths[row]), generator=generator, dtype=torch.float64))
    return torch.cat(drawn) if drawn else torch.zeros(0, dtype=torch.float64)
