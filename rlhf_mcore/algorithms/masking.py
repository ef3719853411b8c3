"""Sums over trainable tokens, and the only place where a loss is divided by global counts.

Values outside a mask are arbitrary and may be NaN. They are removed by selection, not by multiplication with zero (0 * NaN is NaN).
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

    With weights from :func:`row_weights`, this is the microbatch's share of a KL or entropy term of the loss. The gradient with
    respect to ``values`` is zero at positions of weight zero. If ``values`` were computed from invalid inputs there, that computation
    must be masked too (see the ``mask`` of :func:`~rlhf_mcore.algorithms.kl.kl_penalty`).
    """
    return (weights * torch.where(weights != 0, values, 0)).sum()


def row_weights(
    num_sampled: Tensor, aggregation: str, *, num_tokens: int, num_rows: int, constant_length: int | None = None
) -> Tensor:
    """Compute the weight of a row's trainable tokens: loss = sum(weights * per_token_loss) over all microbatches and all ranks.

    The counts refer to the whole minibatch. The gradient therefore does not depend on how its rows are split into microbatches,
    packed, or distributed over ranks. For row i with len_i trainable tokens:

    - ``token``: 1 / num_tokens. Every token has the same weight (DAPO, arXiv 2503.14476, eq. 8).
    - ``sequence``: 1 / (len_i * num_rows). Mean of the rows' means (GRPO, arXiv 2402.03300, eq. 3).
    - ``constant``: 1 / (constant_length * num_rows). No length bias (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Args:
        num_sampled: [rows] trainable tokens of some rows of the minibatch.
        aggregation: one of ``AGGREGATIONS``.
        num_tokens: trainable tokens of the minibatch over all ranks.
        num_rows: rows of the minibatch over all ranks, including rows without a trainable token.
        constant_length: number of tokens; used and required only by ``constant``.

    Returns:
        [rows] float32.

    Raises:
        ValueError: unknown aggregation, or ``constant`` without a positive length.
    """
    # The minimum of 1 only prevents 0 / 0 in a minibatch without any trainable token.
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
