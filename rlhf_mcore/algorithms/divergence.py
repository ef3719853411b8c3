"""Divergence of the probabilities that two policies give a sampled token, where all other tokens are one other outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Logprobs of float32 do not tell probabilities apart that are closer to 1.
_CERTAIN = 1e-6


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) of two outcomes, the sampled token or another, from probabilities of the token.

    D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). It is infinite where q is certain of what p is not.
    """
    others = torch.special.xlogy(1 - p, 1 - p) - torch.special.xlogy(1 - p, 1 - q)
    return torch.special.xlogy(p, p) - torch.special.xlogy(p, q) + others


def find_divergent(old_logprobs: Tensor, rollout_logprobs: Tensor, bound: float) -> Tensor:
    """Return in which tokens trainer and engine are too far apart: KPop (Guo et al. 2026, Ant Group, ringtech.notion.site/kpop).

    max(D(p || q), D(q || p)) > bound, with the trainer's and the engine's probability p and q of the sampled token and the divergence
    D of two outcomes, :func:`binary_kl`. A band of ratios is equally wide for all tokens. This one is wider
    for a rare token and narrower for a likely one. Probabilities are held between 1e-6 and 1 - 1e-6, as in prime-rl: else a token
    whose logprob is rounded to 0 on one side alone would be infinitely far.

    Args:
        old_logprobs, rollout_logprobs: any shape, of the trainer before the step's updates and of the engine.
    """
    p, q = (values.double().exp().clamp(_CERTAIN, 1 - _CERTAIN) for values in (old_logprobs, rollout_logprobs))
    return torch.maximum(binary_kl(p, q), binary_kl(q, p)) > bound
