"""The loss that trains the indexer of sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1.1).

For each token the target is the distribution of the attention over its keys: summed over heads, and normalised. The loss is
KL(target || softmax of the indexer's scores). In the warm-up, attention and loss use all earlier tokens. Later they use the
selected tokens. The target and the indexer's inputs are detached, so the indexer learns from this loss alone, and no other weight
learns from it.

Scores of all pairs of tokens need much memory. The gradients of the loss are therefore computed in the forward pass, for some
tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SCORES = 1 << 25  # scores of heads that exist at once: 128 MiB
Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def indexer_loss(
    score: Score,
    inputs: tuple[Tensor, Tensor, Tensor],
    attended: tuple[Tensor, Tensor, float],
    rows: Tensor,
    selected: Tensor | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the summed loss of some tokens of one sequence. Collective over ``group``.

    Args:
        score: maps queries, keys and weights of the indexer to scores [r, t].
        inputs: the indexer's queries [r, ...], keys [t, ...] and weights [r, ...], which get gradients.
        attended: queries [r, heads of this rank, d] and keys [t, heads of this rank, d] of the attention, and their scale.
        rows: [r], the places of the tokens in the sequence.
        selected: [r, top_k], the places of the tokens' keys. None: all earlier tokens.
        group: tensor-parallel ranks, which have the other heads.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    queries, keys, scale = attended
    total, gradients = keys.new_zeros((), dtype=torch.float32), [torch.zeros_like(x) for x in leaves]
    heads, length = max(leaves[0].size(1), queries.size(1)), len(keys)
    step = max(_SCORES // (heads * length), 1)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        seen = torch.arange(length, device=rows.device) <= rows[part, None]
        if selected is not None:
            seen &= torch.zeros_like(seen).scatter_(-1, selected[part], True)
        target = _target(queries[part], keys, scale, seen, group)
        with torch.enable_grad():
            scores = score(leaves[0][part], leaves[1], leaves[2][part]).masked_fill(~seen, -torch.inf)
            logprobs = scores.log_softmax(-1).masked_fill(~seen, 0.0)
            loss = (torch.xlogy(target, target) - target * logprobs).sum()
        total += loss.detach()
        for sum_, gradient in zip(gradients, torch.autograd.grad(loss, leaves), strict=True):
            sum_ += gradient
    known: Tensor = _KnownGradients.apply(total, gradients, *inputs)
    return known


@torch.no_grad()
def _target(queries: Tensor, keys: Tensor, scale: float, seen: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the share [r, t] of the attention of all heads that each key gets."""
    scores = torch.einsum("rhd,thd->hrt", queries.float(), keys.float()) * scale
    summed = scores.masked_fill_(~seen, -torch.inf).softmax(-1).sum(0)
    if group.size() > 1:
        dist.all_reduce(summed, group=group)
    return summed / summed.sum(-1, keepdim=True)


class _KnownGradients(torch.autograd.Function):
    """A value with the gradients ``gradients`` for ``inputs``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * grads[0] for gradient in ctx.saved_tensors)
