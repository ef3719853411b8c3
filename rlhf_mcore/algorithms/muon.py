"""The direction of Muon's update: a matrix of momentum with singular values near 1 in the place of its own.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); its size as in Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv
2502.16982), equation 4: as large as AdamW's updates are, so that learning rates and weight decays of AdamW are Muon's too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, of the quintic iteration
_STEPS = 5
_RMS = 0.2  # of AdamW's updates, as Liu et al. have measured it


def orthogonalized(matrix: Tensor) -> Tensor:
    """U V^T of matrix = U S V^T [m, n], nearly: singular values come to 0.7 to 1.2, by five Newton-Schulz iterations."""
    first, second, third = _COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def update_scale(rows: int, columns: int) -> float:
    """What a direction is multiplied by, so that the root mean square of its elements is 0.2."""
    return _RMS * math.sqrt(max(rows, columns))
