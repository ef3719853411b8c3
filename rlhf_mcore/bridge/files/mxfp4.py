"""Weights in mxfp4: 32 values of four bits share an exponent (OCP Microscaling Formats v1.0, 2023, section 5).

A matrix [rows, columns] is stored by columns: ``blocks`` [columns, rows / 32, 16] uint8 have two values in a byte, the first in the
lower half, and ``scales`` [columns, rows / 32] uint8 the exponents. So the authors of gpt-oss store the experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Twice the values, and one more than the bias of the exponents: half of the largest power of two is still a number in bf16.
_TWICE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_BIAS_OF_HALVES = 128


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute the matrices [..., rows, columns] bf16 of ``blocks`` [..., columns, rows / 32, 16] and ``scales`` [..., columns,
    rows / 32].
    """
    values = torch.tensor([*_TWICE, *(-value for value in _TWICE)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2]: the values of every byte
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS_OF_HALVES).bfloat16()
    matrices = pairs.view(torch.int32)[:, 0][blocks.int()].view(torch.bfloat16)  # two values move as one number
    return matrices.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2).mT
