"""Logprobs and entropy over logits whose vocabulary is sharded over tensor-parallel ranks.

No rank ever sees the full vocabulary: three scalars per token are reduced instead. The backward pass recomputes the softmax in
chunks of tokens, so the extra memory is one chunk of fp32 logits whatever the batch. Megatron's own vocab-parallel cross entropy
is not used: it overwrites fp32 logits, gives no entropy, and its fused form rounds gradients to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_TOKENS = 2048


def vocab_parallel_logprobs(
    logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Logprob of each label and entropy of each distribution, at a sampling temperature.

    Args:
        logits: [..., V_local], this rank's columns of the padded vocabulary. Not modified.
        labels: [...] int64 token ids.
        vocab_size: the true size; columns beyond it are padding and get no probability.
        temperature: logits are divided by it, as the sampler does.
        group: the tensor-parallel group.

    Returns:
        logprobs [...] and entropy [...], both fp32 and differentiable, equal on all ranks of the group.
    """
    shape = labels.shape
    flat = logits.reshape(-1, logits.size(-1))
    logprobs, entropy = _VocabParallel.apply(flat, labels.reshape(-1), vocab_size, temperature, group)
    return logprobs.view(shape), entropy.view(shape)


class _VocabParallel(torch.autograd.Function):
    """With z = logits / T - max(logits / T): logprob = z_y - log sum_j exp z_j, entropy = log sum_j exp z_j - sum_j p_j z_j.

    The largest logit is subtracted first, so an offset that all logits share costs no precision.

    d logprob / d z_j = 1[j = y] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, temperature: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.size(1)
        parts = [
            _forward_chunk(_scaled(logits[a:b], temperature, vocab_size - first), labels[a:b] - first, group)
            for a, b in _chunks(logits.size(0))
        ]
        target, log_sum, expected, peak = (torch.cat(column) for column in zip(*parts, strict=True))
        entropy = log_sum - expected
        ctx.save_for_backward(logits, labels, peak, log_sum, entropy)
        ctx.first, ctx.width, ctx.temperature = first, vocab_size - first, temperature
        return target - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, peak, log_sum, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        out = torch.empty_like(logits)
        for a, b in _chunks(logits.size(0)):
            z = _scaled(logits[a:b], ctx.temperature, ctx.width)
            log_p = z - peak[a:b, None] - log_sum[a:b, None]
            p = log_p.exp()
            # Padding has p = 0 and log p = -inf, whose product must be 0.
            surprise = torch.where(p > 0, log_p, 0.0) + entropy[a:b, None]
            grad = -p * (grad_logprobs[a:b, None] + grad_entropy[a:b, None] * surprise)
            columns, here = _local_columns(labels[a:b] - ctx.first, logits.size(1))
            grad[torch.arange(b - a, device=grad.device), columns] += torch.where(here, grad_logprobs[a:b], 0.0)
            out[a:b] = grad / ctx.temperature
        return out, None, None, None, None


def _chunks(num_tokens: int) -> list[tuple[int, int]]:
    return [(a, min(a + CHUNK_TOKENS, num_tokens)) for a in range(0, num_tokens, CHUNK_TOKENS)]


def _scaled(logits: Tensor, temperature: float, width: int) -> Tensor:
    """fp32 logits over temperature, a new tensor, with the padding columns at -inf. ``width``: true columns from this rank on."""
    z = logits.float() / temperature
    if width < z.size(1):
        z[:, max(width, 0) :] = -torch.inf
    return z


def _local_columns(labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (0 where another rank has it), and whether this rank has it."""
    here = (labels >= 0) & (labels < width)
    return torch.where(here, labels, 0), here


def _forward_chunk(z: Tensor, labels: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Target logit, log-sum-exp and expected logit of each token, relative to its largest one, and that: [n] each.

    Reduced over the group. ``z`` is overwritten.
    """
    peak = z.max(dim=1).values
    if group.size() > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    z -= peak[:, None]
    weights = z.exp()
    columns, here = _local_columns(labels, z.size(1))
    target = torch.where(here, z.gather(1, columns[:, None]).squeeze(1), 0.0)
    sums = torch.stack([target, weights.sum(1), (weights * torch.where(weights > 0, z, 0.0)).sum(1)])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums[0], sums[1].log(), sums[2] / sums[1], peak
