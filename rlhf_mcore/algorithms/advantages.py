"""Advantage estimators: one function per paper, registered under its name in ``algorithm.advantage``.

With an environment, a response has several turns of the policy. ``turn_gamma`` discounts the rewards of later turns. With
``turn_credit`` a turn is one action, whose tokens share one advantage. With one turn ``turn_gamma`` has no effect, and
``turn_credit`` has none on group-relative advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator
from rlhf_mcore.algorithms.turns import OwnedTurns, turn_returns

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.rows import OwnedRows
    from rlhf_mcore.config.schema import AlgorithmConfig

# Sums whose relative difference is below this are equal but for rounding, and no difference to learn from: two units in the last
# place of float32, up and down, or the additions of thousands of turns in float64.
ROUNDING = {torch.float32: 5 * 2.0**-23, torch.float64: 2.0**-40}


@advantage_estimator("gae")
def gae(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16).

    A_t = sum_k (gamma lam)^k delta_{t+k},   delta_t = r_t + gamma V_{t+1} - V_t,   returns_t = A_t + V_t

    over the trainable tokens of a response. Other tokens between them (a tool's output) are skipped, and gamma is multiplied by
    ``turn_gamma`` there. With ``turn_credit`` the steps are turns, with V before the first token of a turn, the sum of its rewards
    and ``turn_gamma`` as gamma (Li et al. 2025, Turn-PPO, arXiv 2512.17008). After the last token V is 0, but with
    ``bootstrap_truncated`` it is ``bootstrap_values`` if the token limit ended the response (Pardo et al. 2018, arXiv 1712.00378).
    ``whiten_advantages`` normalises the advantages over all tokens, but not ``returns``.

    ``critic_lam`` is the lam of the returns, and ``lam_alpha`` makes that of the advantages 1 - 1 / (alpha l) for a response of l
    steps, at least 0 (VAPO, Yue et al. 2025, arXiv 2504.05118, sections 4.1 and 4.2).
    """
    assert inputs.old_values is not None, "gae needs the critic's values"
    ends = torch.zeros_like(inputs.truncated, dtype=torch.float64)  # [B]
    if cfg.bootstrap_truncated:
        assert inputs.bootstrap_values is not None, (
            "a truncated response needs the value of the state it was cut off in"
        )
        ends = torch.where(inputs.truncated, inputs.bootstrap_values.double(), ends)
    values = torch.where(inputs.loss_mask, inputs.old_values.double(), 0)
    advantages, returns = _lambda_advantages(inputs, values, ends, cfg, cfg.lam, cfg.lam_alpha)
    if cfg.critic_lam is not None:
        _, returns = _lambda_advantages(inputs, values, ends, cfg, cfg.critic_lam)
    if cfg.whiten_advantages:
        advantages = whiten(advantages, inputs.loss_mask, inputs.rows)
    return Advantages(advantages.float(), returns.float())


@advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Outcome relative to the group: GRPO, or Dr. GRPO without ``normalize_std``. See :func:`group_relative`."""
    return Advantages(_compare_outcomes(inputs, cfg, partial(group_relative, normalize_std=cfg.normalize_std)))


@advantage_estimator("rloo")
def rloo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, section 3.3; Kool et al. 2019).

    A_i = r_i - mean of the r_j, j != i, of the group = G / (G - 1) (r_i - mean of the group)

    Raises:
        ValueError: a group has a single response.
    """
    return Advantages(_compare_outcomes(inputs, cfg, _leave_one_out))


@advantage_estimator("opo")
def opo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Outcome minus the baseline of least variance: OPO (Hao et al. 2025, arXiv 2505.23585, eq. 8).

    A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, with the responses' lengths l in trainable tokens. The square of a
    response's gradient is taken to grow with its length.
    """
    lengths = inputs.rows.sums(torch.ones_like(inputs.rewards), inputs.loss_mask)
    of_responses = replace(cfg, turn_credit=False)
    return Advantages(_compare_outcomes(inputs, of_responses, partial(_minus_mean_by_length, lengths=lengths)))


@advantage_estimator("reinforce")
def reinforce(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Discounted sum of the rewards from a token on (Williams 1992), A_t = sum_k gamma^k r_{t+k}; see ``whiten_advantages``.

    Turns are handled as in :func:`gae`.
    """
    advantages = _discount_rewards(inputs, cfg)
    if cfg.whiten_advantages:
        advantages = whiten(advantages, inputs.loss_mask, inputs.rows)
    return Advantages(advantages.float())


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): :func:`reinforce`, normalised over all tokens of the step."""
    advantages = reinforce(inputs, cfg).advantages if cfg.whiten_advantages else _discount_rewards(inputs, cfg)
    return Advantages(whiten(advantages, inputs.loss_mask, inputs.rows).float())


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262): outcome - mean, normalised over all tokens."""
    relative = _compare_outcomes(inputs, cfg, partial(group_relative, normalize_std=False))
    return Advantages(whiten(relative, inputs.loss_mask, inputs.rows))


def outcomes(inputs: AdvantageInputs) -> Tensor:
    """Sum the rewards of each response's tokens: [B] float64, on every rank."""
    return inputs.rows.sums(inputs.rewards, inputs.loss_mask)


def _compare_outcomes(
    inputs: AdvantageInputs, cfg: AlgorithmConfig, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply ``compare`` (values, groups -> advantages) to outcomes: [N] advantages, zero outside the loss mask.

    An outcome is the sum of turn_gamma^j R_j over turns j from 0, where R_j is the sum of the rewards of turn j. With ``turn_credit``
    the return of turn j, G_j = R_j + turn_gamma G_{j+1}, is compared with the returns of turn j in the group's other responses (Ding
    et al. 2025, GTPO, arXiv 2511.14846, return-based advantages). A turn that no other response reached has the advantage of its
    whole response, as in GiGPO for a state of a single member (Feng et al. 2025, arXiv 2505.10978).
    """
    if cfg.turn_gamma == 1.0 and not cfg.turn_credit:
        return broadcast_to_tokens(compare(outcomes(inputs), inputs.group_ids), inputs)
    turns = OwnedTurns.of(inputs.loss_mask, inputs.rows)
    returns, exists = turn_returns(inputs.rewards, turns, inputs.rows, cfg.turn_gamma)
    of_responses = compare(returns[:, 0], inputs.group_ids)
    if not cfg.turn_credit:
        return broadcast_to_tokens(of_responses, inputs)
    _, groups = torch.unique(inputs.group_ids, return_inverse=True)
    # The same number for turn j of all responses of a group.
    numbers = (groups[:, None] * exists.shape[1] + torch.arange(exists.shape[1]))[exists]
    is_shared = (numbers.bincount() > 1)[numbers]
    relative = of_responses[:, None].expand(exists.shape)[exists].clone()
    relative[is_shared] = compare(returns[exists][is_shared], numbers[is_shared])
    of_turns = torch.zeros(exists.shape, dtype=torch.float32)
    of_turns[exists] = relative.float()
    of_tokens = torch.zeros(inputs.rewards.shape, dtype=torch.float32)
    of_tokens[turns.tokens] = of_turns[turns.rows, turns.places][turns.of_token]
    return of_tokens


def _minus_mean_by_length(values: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    relative = group_relative(values, groups, normalize_std=False)  # equal values are exact zeros
    _, index = torch.unique(groups, return_inverse=True)
    zeros = lengths.new_zeros(len(groups))
    means = zeros.index_add(0, index, lengths * relative) / zeros.index_add(0, index, lengths).clamp(min=1)
    return relative - means[index]


def _leave_one_out(values: Tensor, groups: Tensor) -> Tensor:
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    sizes = counts[index]
    if bool((sizes < 2).any()):
        raise ValueError("a group has a single response, rloo compares with the others: sample at least 2 per prompt")
    return group_relative(values, groups, normalize_std=False) * (sizes / (sizes - 1))


def group_relative(outcomes: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Compute the advantage of each response relative to the other responses to the same prompt.

    With mean and std over the outcomes r of the group of i:

    - ``normalize_std``: (r_i - mean) / (std + eps)   (GRPO, arXiv 2402.03300, section 4.1.2). The paper does not say
      which standard deviation; as in the usual implementations it is the sample one, with G - 1 in the denominator;
    - otherwise: r_i - mean   (Dr. GRPO, arXiv 2503.20783, section 3.2), which is 0 for a group of one.

    Outcomes that are equal, but for the rounding of their dtype, give exactly zero. A NaN outcome makes only its own group NaN.

    Args:
        outcomes: [B] total reward of each response. Every group must be complete.
        group_ids: [B] int64, equal for the responses to one prompt, in any order.

    Returns:
        [B], at least float32.

    Raises:
        ValueError: ``normalize_std`` with a group of one response, which has no standard deviation.
    """
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if normalize_std and bool((counts < 2).any()):
        lonely = group_ids[(counts < 2)[index]][0].item()
        raise ValueError(
            f"group {lonely} has a single response, so its standard deviation is undefined: "
            "sample at least 2 responses per prompt, or switch normalize_std off"
        )
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=outcomes.device)
    wide = outcomes.double()
    largest = zeros.scatter_reduce(0, index, wide.abs(), "amax")
    # Relative to the group's smallest outcome, equal outcomes are exact zeros whatever their value.
    wide = wide - zeros.scatter_reduce(0, index, wide, "amin", include_self=False)[index]
    spread = zeros.scatter_reduce(0, index, wide, "amax")
    deviations = wide - (zeros.index_add(0, index, wide) / counts)[index]
    if normalize_std:
        stds = (zeros.index_add(0, index, deviations.square()) / (counts - 1)).sqrt()
        deviations = deviations / (stds[index] + eps)
    dtype = torch.promote_types(outcomes.dtype, torch.float32)
    return torch.where((spread <= ROUNDING[dtype] * largest)[index], 0.0, deviations).to(dtype)


def broadcast_to_tokens(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Copy the advantage of each row [B] to its trainable tokens: [N] float32, zero outside the loss mask."""
    return torch.where(inputs.loss_mask, inputs.rows.to_tokens(advantages.float()), 0)


def whiten(values: Tensor, mask: Tensor, rows: OwnedRows, eps: float = 1e-8) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) over all tokens of the step in the bool mask, with N in the variance; zero outside.

    ``eps`` and its place are those of verl, OpenRLHF and TRL: a deviation below 1e-4 is noise, and is not scaled up to 1.
    Values that are equal, but for the rounding of float32, give exactly zero.

    Args:
        values, mask: [N], of the rows that this rank owns.
        rows: the rows that this rank owns. Mean and variance are over all rows of the step.
    """
    counts = rows.sums(torch.ones_like(values), mask)
    total = counts.sum()
    if not total:
        return torch.zeros_like(values)
    smallest, largest = (extremes[counts > 0] for extremes in rows.extremes(values, mask))
    # Relative to the smallest value, equal values are exact zeros whatever their value.
    deviations = torch.where(mask, values.double() - smallest.min(), 0)
    deviations = deviations - rows.sums(deviations, mask).sum() / total
    variance = rows.sums(deviations.square(), mask).sum() / total
    if largest.max() - smallest.min() <= ROUNDING[values.dtype] * torch.maximum(smallest.abs(), largest.abs()).max():
        return torch.zeros_like(values)
    return torch.where(mask, (deviations * (variance + eps).rsqrt()).to(values.dtype), 0)


def _discount_rewards(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Tensor:
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
    """Compute advantages and returns [N] float64 by the recursion over tokens, or turns, of each row; zero outside the mask.

    ``values`` [N] are V(state before a token), ``ends`` [B] V(state after the last token). ``turn_gamma`` is not applied there.
    With ``alpha``, lam is 1 - 1 / (alpha times the steps of a row).
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
    # Longest rows first: those that still have a step k from their end are always the first ones.
    order = sizes.argsort(descending=True, stable=True)
    last = (sizes.cumsum(0) - 1)[order]
    # How many rows have more than k steps, by k.
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
