"""Rewards per token, and advantages from their discounted sums: one function per paper, registered as in ``advantages``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.advantages import OwnedTurns, whiten
from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows
    from rlhf_mcore.config.schema import AlgorithmConfig


def token_rewards(
    scores: Tensor,
    loss_mask: Tensor,
    rows: OwnedRows,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """Add each score at its row's last trainable token, and subtract the KL penalty at every trainable token.

    rewards_k = turn reward_k + [k is the last trainable token of its row] * (score - turn rewards of the row) - kl_coef * kl_k
    (InstructGPT, arXiv 2203.02155, eq. 2, written per token). Without the KL, the rewards of a row add up to its score.

    Args:
        scores: [B] raw reward per response.
        loss_mask: [N] bool, for the rows that this rank owns.
        rows: the rows that this rank owns.
        kl: [N] per-token KL to the reference; values outside the mask are ignored.
        kl_coef: not negative; 0 ignores ``kl``.
        turn_rewards: [N] rewards of single turns at the last token of each turn. They are part of the scores. None: no turn rewards.

    Returns:
        [N] float64, so that different scores stay different; zero outside the mask. A row without a trainable token has only zeros, so
        its score is lost.

    Raises:
        ValueError: ``kl_coef`` is not 0, but ``kl`` is None.
    """
    if turn_rewards is None:
        rewards = torch.where(rows.last(loss_mask), rows.to_tokens(scores.double()), 0.0)
    else:
        rest = rows.to_tokens(scores.double() - rows.local_sums(turn_rewards, loss_mask))
        rewards = torch.where(rows.last(loss_mask), rest, 0.0) + torch.where(loss_mask, turn_rewards, 0.0)
    if kl_coef == 0.0:
        return rewards
    if kl is None:
        raise ValueError(f"kl_coef is {kl_coef}, but kl is missing; pass the per-token KL, or kl_coef=0")
    return rewards - torch.where(loss_mask, kl_coef * kl.float(), 0.0)


def overlong_penalty(response_lengths: Tensor, max_tokens: int, cache_tokens: int, penalty: float = 1.0) -> Tensor:
    """Compute the soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), which the caller adds to the scores.

    For a response of length n, it is 0 up to max_tokens - cache_tokens, falls linearly to -penalty at max_tokens, and stays at
    -penalty beyond. The paper's penalty is 1.

    Args:
        response_lengths: [B] tokens.

    Returns:
        [B] float32, at most 0.
    """
    excess = response_lengths.float() - (max_tokens - cache_tokens)
    return -penalty * (excess / cache_tokens).clamp(0.0, 1.0)


@advantage_estimator("gae")
def gae(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute generalised advantage estimates (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    A_t = sum_k (gamma lam)^k delta_{t+k},   delta_t = r_t + gamma V_{t+1} - V_t,   returns_t = A_t + V_t

    The sums are over the trainable tokens of a response. Other tokens between them (a tool's output) are skipped; there gamma is
    multiplied by ``turn_gamma``. With ``turn_credit`` the steps are turns: V is the value before the first token of a turn, r is the
    sum of the turn's rewards, and gamma is ``turn_gamma`` (Li et al. 2025, Turn-PPO, arXiv 2512.17008). After the last token V is 0.
    With ``bootstrap_truncated``, V is ``bootstrap_values`` if the token limit ended the response (Pardo et al. 2018, arXiv
    1712.00378). ``whiten_advantages`` normalises the advantages over all tokens, but not ``returns``.

    ``critic_lam`` is lam for the returns. With ``lam_alpha``, lam for the advantages is 1 - 1 / (alpha l) for a response of l steps,
    and at least 0 (VAPO, Yue et al. 2025, arXiv 2504.05118, sections 4.1 and 4.2).
    """
    assert inputs.old_values is not None, "gae needs the critic's values"
    ends = torch.zeros_like(inputs.truncated, dtype=torch.float64)  # [B]
    if cfg.bootstrap_truncated:
        assert inputs.bootstrap_values is not None, "a truncated response needs the value of its last state"
        ends = torch.where(inputs.truncated, inputs.bootstrap_values.double(), ends)
    values = torch.where(inputs.loss_mask, inputs.old_values.double(), 0)
    advantages, returns = _lambda_advantages(inputs, values, ends, cfg, cfg.lam, cfg.lam_alpha)
    if cfg.critic_lam is not None:
        _, returns = _lambda_advantages(inputs, values, ends, cfg, cfg.critic_lam)
    if cfg.whiten_advantages:
        advantages = whiten(advantages, inputs.loss_mask, inputs.rows)
    return Advantages(advantages.float(), returns.float())


@advantage_estimator("reinforce")
def reinforce(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute the discounted sum of the rewards from each token on (Williams 1992): A_t = sum_k gamma^k r_{t+k}.

    Turns are handled as in :func:`gae`. ``whiten_advantages`` normalises the advantages over all tokens.
    """
    advantages = discount_rewards(inputs, cfg)
    if cfg.whiten_advantages:
        advantages = whiten(advantages, inputs.loss_mask, inputs.rows)
    return Advantages(advantages.float())


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute :func:`reinforce`, normalised over all tokens of the step: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262)."""
    advantages = reinforce(inputs, cfg).advantages if cfg.whiten_advantages else discount_rewards(inputs, cfg)
    return Advantages(whiten(advantages, inputs.loss_mask, inputs.rows).float())


@advantage_estimator("remax")
def remax(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute the sum of later rewards minus the greedy response's score: ReMax (Li et al. 2023, arXiv 2310.10505, algorithm 1).

    A_t = sum_k r_{t+k} - b, where b is the score of the greedy response to the same prompt. b does not depend on the sampled response,
    so the gradient stays unbiased. A KL penalty in the reward is part of the sampled response's r, but not of b.
    """
    assert inputs.baselines is not None, "remax needs the scores of greedy responses"
    sums = discount_rewards(inputs, cfg.model_copy(update={"gamma": 1.0, "turn_gamma": 1.0, "turn_credit": False}))
    return Advantages(torch.where(inputs.loss_mask, sums - inputs.rows.to_tokens(inputs.baselines), 0).float())


def discount_rewards(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Tensor:
    """Compute the discounted sum of the rewards from each token on: [N] float64."""
    zeros = torch.zeros(inputs.rewards.shape, dtype=torch.float64)
    ends = torch.zeros_like(inputs.truncated, dtype=torch.float64)
    return _lambda_advantages(inputs, zeros, ends, cfg, lam=1.0)[0]


def _lambda_advantages(
    inputs: AdvantageInputs,
    values: Tensor,
    ends: Tensor,
    cfg: AlgorithmConfig,
    lam: float,
    alpha: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [N] float64 by recursion over the tokens or turns of each row; zero outside the mask.

    ``values`` [N] is V(state before a token), ``ends`` [B] is V(state after the last token), to which ``turn_gamma`` is not applied.
    With ``alpha``, lam is 1 - 1 / (alpha times the number of steps of a row).
    """
    turns = OwnedTurns.of(inputs.loss_mask, inputs.rows)
    values = values[turns.tokens]
    if cfg.turn_credit:
        rewards, values, rows = turns.sums(inputs.rewards), values[turns.first], turns.rows
        gammas = torch.ones(len(rows), dtype=torch.float64)
        gammas[turns.has_next] = cfg.turn_gamma
    else:
        rewards, rows = inputs.rewards[turns.tokens].double(), inputs.rows.token_rows[turns.tokens]
        gammas = torch.full_like(rewards, cfg.gamma, dtype=torch.float64)
        gammas[turns.last[turns.has_next]] *= cfg.turn_gamma
    lams = torch.full_like(gammas, lam)
    if alpha is not None:
        lams = (1 - 1 / (alpha * rows.bincount()[rows].double())).clamp(min=0)
    of_steps = _sum_deltas(rewards, values, rows, ends, gammas, lams)
    if cfg.turn_credit:
        of_steps, values = of_steps[turns.of_token], values[turns.of_token]
    advantages = torch.zeros(inputs.rewards.shape, dtype=torch.float64)
    returns = advantages.clone()
    advantages[turns.tokens], returns[turns.tokens] = of_steps, of_steps + values
    return advantages, returns


def _sum_deltas(rewards: Tensor, values: Tensor, rows: Tensor, ends: Tensor, gammas: Tensor, lams: Tensor) -> Tensor:
    """Compute A_k = delta_k + gamma_k lam_k A_{k+1} over the steps [K] of each row, from the right, in float64. ``rows`` ascends."""
    decays = gammas * lams
    rows, sizes = rows.unique_consecutive(return_counts=True)
    # Sort the rows by length, the longest first. The rows with at least k steps are then always the first rows.
    order = sizes.argsort(descending=True, stable=True)
    last = (sizes.cumsum(0) - 1)[order]
    # Number of rows with more than k steps, for each k.
    num_longer = sizes.bincount().flip(0).cumsum(0).flip(0)[1:].tolist()
    next_values, advantages = ends[rows[order]], torch.zeros(len(rows), dtype=torch.float64)
    result = torch.zeros_like(rewards)
    for step, count in enumerate(num_longer):
        at = last[:count] - step
        delta = rewards[at] + gammas[at] * next_values[:count] - values[at]
        advantages[:count] = delta + decays[at] * advantages[:count]
        next_values[:count] = values[at]
        result[at] = advantages[:count]
    return result
