"""The direction and size of Muon's update: a momentum matrix whose singular values are replaced by values near 1.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). The size follows Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv
2502.16982), equation 4: it is that of AdamW's updates, so that AdamW's learning rates and weight decays can be used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, of the quintic iteration
_STEPS = 5
# The root mean square of AdamW's updates, as Liu et al. measured it.
_RMS = 0.2


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximate U V^T of matrix = U S V^T [m, n] by five Newton-Schulz iterations. Its singular values are 0.7 to 1.2."""
    first, second, third = _COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def update_scale(rows: int, columns: int) -> float:
    """Return the factor of a direction with which the root mean square of its elements is 0.2."""
    return _RMS * math.sqrt(max(rows, columns))
