"""Losses that learn from given responses: fine-tuning, reward models, and policies trained on pairs of responses.

Each loss of pairs takes the logprobs of whole responses, so it does not depend on how a batch is split. It returns the losses and the
implicit rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.interfaces import bind, takes
from rlhf_mcore.algorithms.kl import at_least_float32
from rlhf_mcore.algorithms.masking import masked_sum, weighted_sum
from rlhf_mcore.config import choices
from rlhf_mcore.plugins import registering

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import DpoConfig

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


@dataclass(frozen=True, slots=True)
class Pairs:
    """The responses of b pairs. Column 0 contains the chosen responses, column 1 the rejected responses."""

    logprobs: Tensor  # [b, 2] sum over the tokens of a response, differentiable
    lengths: Tensor  # [b, 2] tokens of a response, at least 1
    ref_logprobs: Tensor | None = None  # [b, 2] the reference's logprobs; None if the loss does not use them
    divergence: float = 0.0  # divergence of the policy from the reference, in nats per response

    @property
    def log_ratios(self) -> Tensor:
        """Return the log ratio of the policy's and the reference's probability of each response: [b, 2]."""
        assert self.ref_logprobs is not None
        return self.logprobs - self.ref_logprobs


# Returns the differentiable losses [b] of pairs, and the policy's implicit rewards [b, 2] of their responses.
PreferenceLoss = Callable[[Pairs], "tuple[Tensor, Tensor]"]

# These functions also take the settings that they declare with ``takes``.
PREFERENCE_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}

preference_loss = registering(PREFERENCE_LOSSES, choices.PREFERENCE_LOSSES)


def find_preference_loss(cfg: DpoConfig) -> PreferenceLoss:
    """Return the loss that ``algorithm.dpo.loss`` names, with its settings bound."""
    return bind(PREFERENCE_LOSSES[cfg.loss], cfg)


def sum_of_pairs(
    pairs: Pairs, weights: Tensor, loss: PreferenceLoss, nll_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses of pairs, and the negative log-likelihoods of their chosen responses (mean over tokens).

    The second term is from RPO (Pang et al. 2024, arXiv 2404.19733, eq. 1), with ``nll_coef`` as its weight alpha.

    Args:
        loss: a loss from :func:`find_preference_loss`.
        weights: [b], 1 / pairs of the whole minibatch; pairs with weight 0 may contain any values.

    Returns:
        The pairs' scalar share of the loss, and the detached sums of ``pair_sums`` over their rewards.
    """
    counted = weights > 0
    both = counted[:, None]
    reference = pairs.ref_logprobs
    if reference is not None:
        reference = torch.where(both, at_least_float32(reference), 0)
    logprobs = torch.where(both, at_least_float32(pairs.logprobs), 0)
    whole = Pairs(logprobs, pairs.lengths.clamp(min=1), reference, pairs.divergence)
    losses, rewards = loss(whole)
    if nll_coef:
        losses = losses - nll_coef * whole.logprobs[:, 0] / whole.lengths[:, 0]
    chosen, rejected = rewards.detach().unbind(1)
    return weighted_sum(losses, weights), pair_sums(chosen, rejected, counted)


@preference_loss("dpo")
@takes("beta", "label_smoothing")
def dpo(pairs: Pairs, *, beta: float, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Compute direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h),  h = r_w - r_l,  r = beta (log pi(y) - log ref(y))

    e = 0 is DPO. Label smoothing e > 0 is cDPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf), which assumes that a share e of the
    pairs is labelled wrongly.
    """
    rewards = beta * pairs.log_ratios
    margins = rewards[:, 0] - rewards[:, 1]
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins), rewards


@preference_loss("ipo")
@takes("beta")
def ipo(pairs: Pairs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Compute identity preference optimisation (Azar et al. 2023, arXiv 2310.12036, eq. 17, with tau = beta).

    loss = (h - 1 / (2 beta))^2,  h = m_w - m_l,  m = (log pi(y) - log ref(y)) / tokens of y

    The log ratios are means over tokens instead of the paper's sums, as in TRL, so that the target does not depend on the length of
    the responses.
    """
    means = pairs.log_ratios / pairs.lengths
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square(), beta * means


@preference_loss("simpo")
@takes("beta", "gamma")
def simpo(pairs: Pairs, *, beta: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute simple preference optimisation (Meng et al. 2024, arXiv 2405.14734, eq. 6), which needs no reference.

    loss = -log sigmoid(r_w - r_l - gamma),  r = beta log pi(y) / tokens of y
    """
    rewards = beta * pairs.logprobs / pairs.lengths
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma), rewards


@preference_loss("orpo")
@takes("beta")
def orpo(pairs: Pairs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Compute odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691, eq. 4 to 7), which needs no reference.

    loss = -m_w - beta log sigmoid(o_w - o_l),  m = log pi(y) / tokens of y,  o = log(p / (1 - p)) with p = exp(m)

    ``beta`` is the paper's lambda. A response with probability 1 has infinite odds, so its m is bounded and has no gradient there.
    """
    means = pairs.logprobs / pairs.lengths
    log_odds = means - _log_complement(means.clamp(max=-torch.finfo(means.dtype).eps))
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1]), beta * means


@preference_loss("kto")
@takes("beta", "desirable_weight", "undesirable_weight")
def kto(pairs: Pairs, *, beta: float, desirable_weight: float, undesirable_weight: float) -> tuple[Tensor, Tensor]:
    """Compute Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8) of a pair's two labelled responses.

    loss = (w_d (1 - sigmoid(r_w - beta z)) + w_u (1 - sigmoid(beta z - r_l))) / 2,  r = beta (log pi(y) - log ref(y))

    z is the divergence, which has no gradient. w_d and w_u are the weights of desirable and undesirable responses.
    """
    rewards = beta * pairs.log_ratios
    gains = rewards - beta * pairs.divergence
    losses = desirable_weight * torch.sigmoid(-gains[:, 0]) + undesirable_weight * torch.sigmoid(gains[:, 1])
    return losses / 2, rewards


def mean_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> float:
    """Estimate KTO's z from the summed logprobs [b] of responses to other prompts: the mean log ratio, at least 0."""
    return max(float((logprobs - ref_logprobs).mean()), 0.0)


def _log_complement(logs: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, exact for both small and large -x (Maechler 2012)."""
    near = logs > -0.6931
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, logs, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, logs))),
    )
