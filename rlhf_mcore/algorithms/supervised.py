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

MAX_EXPONENT = 700.0  # exp of more is no float


def sft_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the trainable tokens, loss = -sum_t w_t logprobs_t.

    Args:
        logprobs: current, differentiable; padded [b, T] or packed [1, N].
        weights: same shape, from :func:`~rlhf_mcore.algorithms.masking.row_weights`; tokens of weight 0 may hold anything.

    Returns:
        The tokens' scalar share of the loss, and the detached sum ``nll`` over the tokens of weight above 0. Divided by their global
        number it is the log of the perplexity.
    """
    logprobs = at_least_float32(logprobs)
    return weighted_sum(-logprobs, weights), {"nll": masked_sum(-logprobs.detach(), weights > 0)}


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, weights: Tensor, *, margins: Tensor | None = None, centering: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Pairwise loss of a reward model (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, eq. 1).

    loss = sum_i w_i (-log sigmoid(c_i - r_i - m_i) + centering (c_i + r_i)^2)

    with margins m (Llama 2, arXiv 2307.09288, eq. 2) and a pull of the rewards towards 0 (Eisenstein et al. 2023, arXiv 2312.09244,
    section 4), which the pairwise term leaves undetermined.

    Args:
        chosen, rejected: [b] rewards of the two responses of each pair, differentiable.
        weights: [b], 1 / pairs of the whole minibatch; pairs of weight 0 may have any rewards.
        margins: [b], how much higher the chosen reward should be; None: 0.

    Returns:
        The pairs' scalar share of the loss, and the detached sums of ``pair_sums`` over the pairs of weight above 0.
    """
    counted = weights > 0
    chosen = torch.where(counted, at_least_float32(chosen), 0)
    rejected = torch.where(counted, at_least_float32(rejected), 0)
    difference = chosen - rejected
    excess = difference if margins is None else difference - torch.where(counted, margins, 0)
    losses = -logsigmoid(excess) + centering * (chosen + rejected).square()
    return weighted_sum(losses, weights), pair_sums(chosen.detach(), rejected.detach(), counted)


def pair_sums(chosen: Tensor, rejected: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Sum what is known of the pairs in the bool ``counted`` [b]. Rewards [b] of other pairs are 0.

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
    """Return exp of the mean negative log-likelihood of a token in nats, infinity if that is too large for a float."""
    return math.exp(nll) if nll < MAX_EXPONENT else math.inf
