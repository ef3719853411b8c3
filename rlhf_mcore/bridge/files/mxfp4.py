"""Weights in mxfp4: 32 values of four bits share an exponent (OCP Microscaling Formats v1.0, 2023, section 5).

A matrix [rows, columns] is stored by columns: ``blocks`` [columns, rows / 32, 16] uint8 have two values in a byte, the first in the
lower half, and ``scales`` [columns, rows / 32] uint8 the exponents. So the authors of gpt-oss store the experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # values that share an exponent
BLOCKS, SCALES = "_blocks", "_scales"  # what is added to a tensor's name
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrices [..., rows, columns] bf16 of ``blocks`` [..., columns, rows / 32, 16] and ``scales`` [..., columns, rows / 32]."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2]: the values of every byte
    found = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(found, scales.int().unsqueeze(-1) - _EXPONENT_BIAS, out=found).flatten(-2).mT
