"""Losses of supervised fine-tuning and reward models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.kl import at_least_float32
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

MAX_EXPONENT = 700.0  # exp of larger numbers overflows


def sft_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the negative log-likelihood of the trainable tokens, loss = -sum_t w_t logprobs_t.

    Args:
        logprobs: current, differentiable; padded [b, T] or packed [1, N].
        weights: same shape, from :func:`~rlhf_mcore.algorithms.masking.row_weights`; tokens with weight 0 may have any value.

    Returns:
        The tokens' scalar share of the loss, and the detached sum ``nll`` over the tokens with a weight above 0. ``nll`` divided by
        the global number of these tokens is the log of the perplexity.
    """
    logprobs = at_least_float32(logprobs)
    return weighted_sum(-logprobs, weights), {"nll": masked_sum(-logprobs.detach(), weights > 0)}


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, weights: Tensor, *, margins: Tensor | None = None, centering: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the pairwise loss of a reward model (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, eq. 1).

    loss = sum_i w_i (-log sigmoid(c_i - r_i - m_i) + centering (c_i + r_i)^2)

    m are margins (Llama 2, arXiv 2307.09288, eq. 2). The second term centres the rewards at 0 (Eisenstein et al. 2023, arXiv
    2312.09244, section 4), because the pairwise term does not determine their mean.

    Args:
        chosen, rejected: [b] rewards of the two responses of each pair, differentiable.
        weights: [b], 1 / pairs of the whole minibatch; pairs with weight 0 may have any rewards.
        margins: [b], required difference between chosen and rejected reward; None: 0.

    Returns:
        The pairs' scalar share of the loss, and the detached sums of ``pair_sums`` over the pairs with a weight above 0.
    """
    counted = weights > 0
    chosen = torch.where(counted, at_least_float32(chosen), 0)
    rejected = torch.where(counted, at_least_float32(rejected), 0)
    difference = chosen - rejected
    excess = difference if margins is None else difference - torch.where(counted, margins, 0)
    losses = -logsigmoid(excess) + centering * (chosen + rejected).square()
    return weighted_sum(losses, weights), pair_sums(chosen.detach(), rejected.detach(), counted)


def pair_sums(chosen: Tensor, rejected: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sum statistics over the pairs in the bool ``counted`` [b]. The rewards [b] of other pairs must be 0.

    Returns:
        ``accuracy`` (pairs in the right order; a tie counts half), ``margin`` (c - r), ``chosen`` and ``rejected``.
    """
    difference = chosen - rejected
    right = (difference > 0).float() + 0.5 * (difference == 0).float()
    return {
        "accuracy": masked_sum(right, counted),
        "margin": difference.sum(),
        "chosen": chosen.sum(),
        "rejected": rejected.sum(),
    }


def perplexity(nll: float) -> float:
    """Return exp of the mean negative log-likelihood of a token in nats, or infinity if it overflows."""
    return math.exp(nll) if nll < MAX_EXPONENT else math.inf
