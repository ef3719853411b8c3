"""Advantages of outcomes relative to their group: one function per paper, registered under its name in ``algorithm.advantage``.

With an environment, a response has several turns of the policy. ``turn_gamma`` discounts the rewards of later turns. With
``turn_credit``, a turn is an action, whose tokens share one advantage. If a response has only one turn, ``turn_gamma`` has no effect,
and ``turn_credit`` does not change group-relative advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows
    from rlhf_mcore.config.schema import AlgorithmConfig


# Sums whose relative difference is below this bound differ only by rounding, so they give no signal. The bound is two units in the
# last place of float32, up and down, or the error of adding thousands of turns in float64.
ROUNDING = {torch.float32: 5 * 2.0**-23, torch.float64: 2.0**-40}


@advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compare outcomes within the group: GRPO, or Dr. GRPO without ``normalize_std``. See :func:`group_relative`."""
    return Advantages(compare_outcomes(inputs, cfg, partial(group_relative, normalize_std=cfg.normalize_std)))


@advantage_estimator("rloo")
def rloo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, section 3.3; Kool et al. 2019).

    A_i = r_i - mean of the r_j, j != i, of the group = G / (G - 1) (r_i - mean of the group)

    Raises:
        ValueError: a group contains a single response.
    """
    return Advantages(compare_outcomes(inputs, cfg, _leave_one_out))


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute REINFORCE++ with the group's mean as baseline (arXiv 2501.03262): outcome - mean, normalised over all tokens."""
    relative = compare_outcomes(inputs, cfg, partial(group_relative, normalize_std=False))
    return Advantages(whiten(relative, inputs.loss_mask, inputs.rows))


def outcomes(inputs: AdvantageInputs) -> Tensor:
    """Sum the rewards of each response's tokens: [B] float64, on every rank."""
    return inputs.rows.sums(inputs.rewards, inputs.loss_mask)


def compare_outcomes(
    inputs: AdvantageInputs, cfg: AlgorithmConfig, compare: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply ``compare`` (values, groups -> advantages) to outcomes: [N] advantages, zero outside the loss mask.

    An outcome is the sum of turn_gamma^j R_j over turns j from 0, where R_j is the sum of the rewards of turn j. With ``turn_credit``,
    the return of turn j, G_j = R_j + turn_gamma G_{j+1}, is compared with the returns of turn j in the group's other responses (Ding
    et al. 2025, GTPO, arXiv 2511.14846, return-based advantages). If only one response reached a turn, the turn gets the advantage of
    its whole response, as GiGPO does for states seen once (Feng et al. 2025, arXiv 2505.10978).
    """
    if cfg.turn_gamma == 1.0 and not cfg.turn_credit:
        return broadcast_to_tokens(compare(outcomes(inputs), inputs.group_ids), inputs)

    turns = OwnedTurns.of(inputs.loss_mask, inputs.rows)
    returns, exists = turn_returns(inputs.rewards, turns, inputs.rows, cfg.turn_gamma)
    of_responses = compare(returns[:, 0], inputs.group_ids)
    if not cfg.turn_credit:
        return broadcast_to_tokens(of_responses, inputs)
    _, groups = torch.unique(inputs.group_ids, return_inverse=True)
    # Turn j of all responses of a group gets the same number.
    numbers = (groups[:, None] * exists.shape[1] + torch.arange(exists.shape[1]))[exists]
    is_shared = (numbers.bincount() > 1)[numbers]
    relative = of_responses[:, None].expand(exists.shape)[exists].clone()
    relative[is_shared] = compare(returns[exists][is_shared], numbers[is_shared])
    of_turns = torch.zeros(exists.shape, dtype=torch.float32)
    of_turns[exists] = relative.float()
    of_tokens = torch.zeros(inputs.rewards.shape, dtype=torch.float32)
    of_tokens[turns.tokens] = of_turns[turns.rows, turns.places][turns.of_token]
    return of_tokens


def _leave_one_out(values: Tensor, groups: Tensor) -> Tensor:
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    sizes = counts[index]
    if bool((sizes < 2).any()):
        raise ValueError(
            "a group contains a single response, but rloo compares responses; sample at least 2 per prompt"
        )
    return group_relative(values, groups, normalize_std=False) * (sizes / (sizes - 1))


def group_relative(outcomes: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Compute the advantage of each response relative to the other responses to the same prompt.

    With mean and std over the outcomes r of the group of i:

    - ``normalize_std``: (r_i - mean) / (std + eps)   (GRPO, arXiv 2402.03300, section 4.1.2). The paper does not define the standard
      deviation. As in common implementations, it is the sample standard deviation, with G - 1 in the denominator;
    - otherwise: r_i - mean   (Dr. GRPO, arXiv 2503.20783, section 3.2), which is 0 for a group with one response.

    Outcomes that are equal, except for the rounding of their dtype, give exactly zero. A NaN outcome makes only its own group NaN.

    Args:
        outcomes: [B] total reward of each response. Every group must be complete.
        group_ids: [B] int64, equal for the responses to one prompt, in any order.

    Returns:
        [B], at least float32.

    Raises:
        ValueError: ``normalize_std`` is set, and a group contains one response, which has no standard deviation.
    """
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if normalize_std and bool((counts < 2).any()):
        lonely = group_ids[(counts < 2)[index]][0].item()
        raise ValueError(
            f"group {lonely} contains a single response, so its standard deviation is undefined; "
            "sample at least 2 responses per prompt, or set normalize_std=false"
        )
    zeros = torch.zeros(len(counts), dtype=torch.float64, device=outcomes.device)
    wide = outcomes.double()
    largest = zeros.scatter_reduce(0, index, wide.abs(), "amax")
    # Subtract the group's smallest outcome, so that equal outcomes become exact zeros for every value.
    wide = wide - zeros.scatter_reduce(0, index, wide, "amin", include_self=False)[index]
    spread = zeros.scatter_reduce(0, index, wide, "amax")
    deviations = wide - (zeros.index_add(0, index, wide) / counts)[index]
    if normalize_std:
        stds = (zeros.index_add(0, index, deviations.square()) / (counts - 1)).sqrt()
        deviations = deviations / (stds[index] + eps)
    dtype = torch.promote_types(outcomes.dtype, torch.float32)
    return torch.where((spread <= ROUNDING[dtype] * largest)[index], 0.0, deviations).to(dtype)


def groups_that_differ(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Mark the groups whose responses have different scores, because group-relative advantages are zero in other groups.

    This is the condition of DAPO's dynamic sampling (arXiv 2503.14476, eq. 11) for scores of any kind.

    Args:
        scores: [B]; group_ids: [B] int64.

    Returns:
        [B] bool, equal for the members of a group.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    empty = scores.new_zeros(int(index.max()) + 1 if index.numel() else 0)
    smallest = empty.scatter_reduce(0, index, scores, "amin", include_self=False)
    largest = empty.scatter_reduce(0, index, scores, "amax", include_self=False)
    # A NaN differs from itself, so its group is kept and can be reported.
    return (largest != smallest)[index]


def broadcast_to_tokens(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Copy the advantage of each row [B] to its trainable tokens: [N] float32, zero outside the loss mask."""
    return torch.where(inputs.loss_mask, inputs.rows.to_tokens(advantages.float()), 0)


def whiten(values: Tensor, mask: Tensor, rows: OwnedRows, eps: float = 1e-8) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) over all tokens of the step in the bool mask, with N in the variance; zero outside.

    ``eps`` has the same value and position as in verl, OpenRLHF and TRL: a deviation below 1e-4 is noise, and is not scaled up to 1.
    Values that are equal, except for the rounding of float32, give exactly zero.

    Args:
        values, mask: [N], for the rows that this rank owns.
        rows: the rows that this rank owns. Mean and variance include all rows of the step.
    """
    counts = rows.sums(torch.ones_like(values), mask)
    total = counts.sum()
    if not total:
        return torch.zeros_like(values)
    smallest, largest = (extremes[counts > 0] for extremes in rows.extremes(values, mask))
    # Subtract the smallest value, so that equal values become exact zeros.
    deviations = torch.where(mask, values.double() - smallest.min(), 0)
    deviations = deviations - rows.sums(deviations, mask).sum() / total
    variance = rows.sums(deviations.square(), mask).sum() / total
    if largest.max() - smallest.min() <= ROUNDING[values.dtype] * torch.maximum(smallest.abs(), largest.abs()).max():
        return torch.zeros_like(values)
    return torch.where(mask, (deviations * (variance + eps).rsqrt()).to(values.dtype), 0)


@dataclass(frozen=True, slots=True)
class OwnedTurns:
    """The M turns of the rows that this rank owns, in order, and their H trainable tokens."""

    tokens: Tensor  # [H] int64: indices of these tokens among all tokens of this rank
    of_token: Tensor  # [H] int64: the turn of each token
    first: Tensor  # [M] int64: the first of the H tokens in each turn
    last: Tensor  # [M] int64: the last of the H tokens in each turn
    rows: Tensor  # [M] int64: the row of each turn
    places: Tensor  # [M] int64: index of a turn in its row, from 0
    has_next: Tensor  # [M] bool: whether another turn of the row follows

    @classmethod
    def of(cls, loss_mask: Tensor, rows: OwnedRows) -> OwnedTurns:
        """Find the turns in the bool ``loss_mask`` [N] of the rows that this rank owns."""
        tokens = loss_mask.nonzero().flatten()
        token_rows = rows.token_rows[tokens]
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[1:] = (tokens[1:] != tokens[:-1] + 1) | (token_rows[1:] != token_rows[:-1])
        first = begins.nonzero().flatten()
        last = torch.cat([first[1:], first.new_tensor([len(tokens)])])[: len(first)] - 1
        turn_rows = token_rows[first]
        is_first = torch.ones_like(turn_rows, dtype=torch.bool)
        is_first[1:] = turn_rows[1:] != turn_rows[:-1]
        places = torch.arange(len(first)) - is_first.nonzero().flatten()[is_first.cumsum(0) - 1]
        has_next = torch.zeros_like(is_first)
        has_next[:-1] = ~is_first[1:]
        return cls(tokens, begins.cumsum(0) - 1, first, last, turn_rows, places, has_next)

    def sums(self, values: Tensor) -> Tensor:
        """Sum ``values`` [N] over the tokens of each turn. Returns [M] float64."""
        zeros = torch.zeros(len(self.rows), dtype=torch.float64)
        return zeros.index_add_(0, self.of_token, values[self.tokens].double())


def turn_returns(rewards: Tensor, turns: OwnedTurns, rows: OwnedRows, gamma: float) -> tuple[Tensor, Tensor]:
    """Compute G_j = R_j + gamma G_{j+1}, where R_j is the sum of the rewards [N] over the tokens of turn j. On every rank.

    Returns:
        [B, J] float64 returns, where J is the largest number of turns of a row, and [B, J] bool: whether a turn exists. A row without
        turns counts as a row with one turn.
    """
    counts = rows.merge(turns.rows.bincount(minlength=rows.num_rows)).clamp(min=1)
    width = int(counts.max()) if len(counts) else 1
    returns = torch.zeros(rows.num_rows, width, dtype=torch.float64)
    returns[turns.rows, turns.places] = turns.sums(rewards)
    returns = rows.merge(returns)
    for place in reversed(range(width - 1)):
        returns[:, place] += gamma * returns[:, place + 1]
    return returns, torch.arange(width) < counts[:, None]


@advantage_estimator("opo")
def opo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Compute the outcome minus the baseline of minimum variance: OPO (Hao et al. 2025, arXiv 2505.23585, eq. 8).

    A_i = r_i - sum_j l_j r_j / sum_j l_j over the group, with the responses' lengths l in trainable tokens. This assumes that the
    squared gradient of a response grows with its length.
    """
    lengths = inputs.rows.sums(torch.ones_like(inputs.rewards), inputs.loss_mask)
    of_responses = cfg.model_copy(update={"turn_credit": False})
    return Advantages(compare_outcomes(inputs, of_responses, partial(_minus_mean_by_length, lengths=lengths)))


def _minus_mean_by_length(values: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    relative = group_relative(values, groups, normalize_std=False)  # equal values are exact zeros
    _, index = torch.unique(groups, return_inverse=True)
    zeros = lengths.new_zeros(len(groups))
    means = zeros.index_add(0, index, lengths * relative) / zeros.index_add(0, index, lengths).clamp(min=1)
    return relative - means[index]


@advantage_estimator("gdpo")
def gdpo(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Normalise each part of a score in its group, then their sum over the step: GDPO (Liu et al. 2026, arXiv 2601.05242, eq. 4-6).

    A^k_i = (r^k_i - mean r^k) / (std r^k + eps) over the group of i, for each part k of the score
    S_i   = sum_k ``reward_weights``_k A^k_i
    A_i   = (S_i - mean S) / (std S + eps) over all responses of the step

    The influence of a part therefore depends on its weight, not on its range. Responses with equal sums but different parts get
    different advantages. Standard deviations are defined as in :func:`~rlhf_mcore.algorithms.advantages.group_relative`. Without
    ``normalize_std``, the first equation has no division. If the step has no parts, the whole score is the only part.
    """
    if inputs.score_parts is None:
        parts, weights = outcomes(inputs)[:, None], [1.0]
    else:
        parts, weights = inputs.score_parts, list((cfg.reward_weights or {}).values())
    groups = inputs.group_ids
    relative = [group_relative(part, groups, cfg.normalize_std) for part in parts.unbind(1)]
    sums = torch.stack([weight * part for weight, part in zip(weights, relative, strict=True)]).sum(0)
    of_responses = group_relative(sums, torch.zeros_like(groups), normalize_std=True) if len(sums) else sums
    return Advantages(broadcast_to_tokens(of_responses, inputs))
