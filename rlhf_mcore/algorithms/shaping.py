"""Convert one score per response to a reward per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.rows import OwnedRows


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
