"""Sums over trainable tokens, and the one place where a loss is divided by global counts.

Values at positions outside a mask may be anything, NaN included: they are selected away, never multiplied by zero
(0 * NaN is NaN).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token", "sequence", "constant")


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the scalar sum of ``values`` where the bool ``mask`` of the same shape is true; 0 for an empty mask."""
    return torch.where(mask, values, 0).sum()


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the scalar sum of ``weights * values`` (same shapes), skipping positions of weight zero.

    With weights from :func:`row_weights` this is the microbatch's share of a KL or entropy term of the loss. Its gradient with
    respect to ``values`` is zero where the weight is zero. If ``values`` were computed from garbage there, that computation must be
    masked too (see the ``mask`` of :func:`~rlhf_mcore.algorithms.kl.kl_penalty`).
    """
    return (weights * torch.where(weights != 0, values, 0)).sum()


def row_weights(
    num_sampled: Tensor, aggregation: str, *, num_tokens: int, num_rows: int, constant_length: int | None = None
) -> Tensor:
    """Compute the weight of a row's trainable tokens: loss = sum(weights * per_token_loss) over all microbatches and all ranks.

    The counts are those of the whole minibatch, so the gradient does not depend on how its rows are cut into microbatches, packed,
    or spread over ranks. For row i with len_i trainable tokens:

    - ``token``: 1 / num_tokens. Every token counts the same (DAPO, arXiv 2503.14476, eq. 8).
    - ``sequence``: 1 / (len_i * num_rows). Mean of the rows' means (GRPO, arXiv 2402.03300, eq. 3).
    - ``constant``: 1 / (constant_length * num_rows). No length bias (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        num_sampled: [rows] trainable tokens of some rows of the minibatch.
        aggregation: one of ``AGGREGATIONS``.
        num_tokens: trainable tokens of the minibatch over all ranks.
        num_rows: rows of the minibatch over all ranks, including those without a trainable token.
        constant_length: tokens; used and needed by ``constant`` only.

    Returns:
        [rows] float32.

    Raises:
        ValueError: unknown aggregation, or ``constant`` without a positive length.
    """
    # A minibatch without any trainable token has nothing to divide; the minimum of 1 only keeps 0 / 0 away.
    ones = torch.ones(len(num_sampled))
    if aggregation == "token":
        divisor = ones * max(num_tokens, 1)
    elif aggregation == "sequence":
        divisor = num_sampled.clamp(min=1) * ones * max(num_rows, 1)
    elif aggregation == "constant":
        if constant_length is None or constant_length < 1:
            raise ValueError(f"aggregation 'constant' needs a constant_length of at least 1, not {constant_length!r}")
        divisor = ones * (constant_length * max(num_rows, 1))
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}: use one of {', '.join(AGGREGATIONS)}")
    return 1.0 / divisor
