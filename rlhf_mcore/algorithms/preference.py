"""Losses of policies that learn from pairs of a better and a worse response.

Each takes logprobs of whole responses, so it does not depend on how a batch is cut, and returns a loss and the implicit rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from rlhf_mcore.algorithms.interfaces import bind, takes
from rlhf_mcore.algorithms.kl import at_least_float32
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.algorithms.supervised import pair_sums
from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import registering

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import DpoConfig


@dataclass(frozen=True, slots=True)
class Pairs:
    """Responses of b pairs. Column 0 holds the chosen ones, column 1 the rejected ones."""

    logprobs: Tensor  # [b, 2] sum over the tokens of a response, differentiable
    lengths: Tensor  # [b, 2] tokens of a response, at least 1
    ref_logprobs: Tensor | None = None  # [b, 2] of the reference; None with a loss that reads none
    divergence: float = 0.0  # of the policy from the reference, in nats of a response

    @property
    def log_ratios(self) -> Tensor:
        """Log of the probability of each response over that of the reference: [b, 2]."""
        assert self.ref_logprobs is not None
        return self.logprobs - self.ref_logprobs


# Returns the losses [b] of pairs, differentiable, and the rewards [b, 2] that the policy implies of their responses.
PreferenceLoss = Callable[[Pairs], "tuple[Tensor, Tensor]"]

# These also take the settings that they declare with ``takes``.
PREFERENCE_LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}

preference_loss = registering(PREFERENCE_LOSSES, choices.PREFERENCE_LOSSES)


def find_preference_loss(cfg: DpoConfig) -> PreferenceLoss:
    """Return the loss that ``algorithm.dpo.loss`` names, with its settings bound."""
    return bind(PREFERENCE_LOSSES[cfg.loss], cfg)


def sum_of_pairs(
    pairs: Pairs, weights: Tensor, loss: PreferenceLoss, nll_coef: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the losses of pairs, and of their chosen responses the negative log-likelihood, mean over tokens.

    The second term is that of RPO (Pang et al. 2024, arXiv 2404.19733, eq. 1), with ``nll_coef`` as its weight alpha.

    Args:
        loss: of :func:`find_preference_loss`.
        weights: [b], 1 / pairs of the whole minibatch; pairs of weight 0 may hold anything.

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
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    loss = -(1 - e) log sigmoid(h) - e log sigmoid(-h),  h = r_w - r_l,  r = beta (log pi(y) - log ref(y))

    with label smoothing e it is cDPO (Mitchell 2023, https://ericmitchell.ai/cdpo.pdf): a share e of the pairs is labelled wrongly.
    e = 0 is DPO.
    """
    rewards = beta * pairs.log_ratios
    margins = rewards[:, 0] - rewards[:, 1]
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins), rewards


@preference_loss("ipo")
@takes("beta")
def ipo(pairs: Pairs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Identity preference optimisation (Azar et al. 2023, arXiv 2310.12036, eq. 17, with tau = beta).

    loss = (h - 1 / (2 beta))^2,  h = m_w - m_l,  m = (log pi(y) - log ref(y)) / tokens of y

    The log ratios are means over tokens and not the paper's sums, as in TRL: so the target does not depend on how long responses are.
    """
    means = pairs.log_ratios / pairs.lengths
    return (means[:, 0] - means[:, 1] - 1 / (2 * beta)).square(), beta * means


@preference_loss("simpo")
@takes("beta", "gamma")
def simpo(pairs: Pairs, *, beta: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Simple preference optimisation (Meng et al. 2024, arXiv 2405.14734, eq. 6). There is no reference.

    loss = -log sigmoid(r_w - r_l - gamma),  r = beta log pi(y) / tokens of y
    """
    rewards = beta * pairs.logprobs / pairs.lengths
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - gamma), rewards


@preference_loss("orpo")
@takes("beta")
def orpo(pairs: Pairs, *, beta: float) -> tuple[Tensor, Tensor]:
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691, eq. 4 to 7). There is no reference.

    loss = -m_w - beta log sigmoid(o_w - o_l),  m = log pi(y) / tokens of y,  o = log(p / (1 - p)) with p = exp(m)

    ``beta`` is the paper's lambda. A response that is certain has infinite odds; its m is bounded where it has no gradient left.
    """
    means = pairs.logprobs / pairs.lengths
    log_odds = means - _log_complement(means.clamp(max=-torch.finfo(means.dtype).eps))
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1]), beta * means


@preference_loss("kto")
@takes("beta", "desirable_weight", "undesirable_weight")
def kto(pairs: Pairs, *, beta: float, desirable_weight: float, undesirable_weight: float) -> tuple[Tensor, Tensor]:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8). A pair is two responses with a label each.

    loss = (w_d (1 - sigmoid(r_w - beta z)) + w_u (1 - sigmoid(beta z - r_l))) / 2,  r = beta (log pi(y) - log ref(y))

    with z the divergence, which has no gradient, and the weights w_d of desirable and w_u of undesirable responses.
    """
    rewards = beta * pairs.log_ratios
    gains = rewards - beta * pairs.divergence
    losses = desirable_weight * torch.sigmoid(-gains[:, 0]) + undesirable_weight * torch.sigmoid(gains[:, 1])
    return losses / 2, rewards


def mean_divergence(logprobs: Tensor, ref_logprobs: Tensor) -> float:
    """Estimate KTO's z from sums of logprobs [b] of responses to other prompts: their mean log ratio, at least 0."""
    return max(float((logprobs - ref_logprobs).mean()), 0.0)


def _log_complement(logs: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, exact for both small and large -x (Maechler 2012)."""
    near = logs > -0.6931
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, logs, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, logs))),
    )
