"""Slow, independent versions of both quantisers: block by block, in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_mcore.families.quantised import Quantisation


def fp8_values() -> np.ndarray[Any, Any]:
    """Return all finite values of e4m3 (Micikevicius et al. 2022, arXiv 2209.05433, table 1), indexed by their 8 bits."""
    values = []
    for bits in range(256):
        sign, exponent, mantissa = -1 if bits >> 7 else 1, bits >> 3 & 15, bits & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(math.nan if (exponent, mantissa) == (15, 7) else sign * size)
    return np.array(values, np.float64)


def slow(weight: Tensor, kind: Quantisation) -> tuple[Tensor, Tensor]:
    """Return the unscaled values of the 8 bits, and the scales. Computed block by block in numpy."""
    matrix = weight.float().numpy()
    rows, columns = kind.block
    columns = min(columns, matrix.shape[1])
    count = (-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    scales, values = np.zeros(count, np.float32), np.zeros(matrix.shape, np.float32)
    grid = fp8_values()
    finite = np.sort(grid[np.isfinite(grid)])
    for i in range(count[0]):
        for j in range(count[1]):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            largest = np.abs(matrix[at]).max()
            if kind.name == "int8":
                scale = np.float32(largest / np.float32(127.5)) or np.float32(2.0**-23)
                values[at] = np.rint(np.clip(matrix[at] / scale, -128, 127)) + np.float32(0)  # integers have no -0
            else:
                scale = np.float32(max(largest, np.float32(1e-4)) / np.float32(448))
                values[at] = nearest(matrix[at] * (np.float32(1) / scale), finite)
            scales[i, j] = scale
    return torch.from_numpy(values), torch.from_numpy(scales)


def amax_of_blocks(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each block of 128x128."""
    blocks = [[part.abs().max() for part in rows.split(128, 1)] for rows in weight.float().split(128)]
    return torch.tensor(blocks)


def of_training(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unscaled fp8 values and the scales like Transformer Engine's block kernel, in numpy.

    The factor is 448 / amax in fp32, and 1 for zeros (``compute_scale_from_amax``). The scale is the reciprocal of the factor.
    """
    matrix, amax = weight.float().numpy(), amax_of_blocks(weight).numpy()
    factors = np.where(amax > 0, np.float32(448) / np.where(amax > 0, amax, np.float32(1)), np.float32(1)).astype(
        np.float32
    )
    grid = fp8_values()
    spread = factors.repeat(128, 0).repeat(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    values = nearest(matrix * spread, np.sort(grid[np.isfinite(grid)])).astype(np.float32)
    return torch.from_numpy(values), torch.from_numpy(np.float32(1) / factors)


def nearest(numbers: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to the nearest value. Ties go to the value with an even mantissa."""
    high = np.clip(np.searchsorted(values, numbers), 1, len(values) - 1)
    low = high - 1
    below, above = numbers - values[low], values[high] - numbers
    is_even = torch.from_numpy(values[low]).to(torch.float8_e4m3fn).view(torch.uint8).numpy() % 2 == 0
    return np.where((below < above) | ((below == above) & is_even), values[low], values[high])


def slow_values(weight: Tensor, kind: Quantisation) -> Tensor:
    values, scales = slow(weight, kind)
    width = 128 if kind.name == "fp8" else weight.shape[1]
    spread = scales.repeat_interleave(kind.block[0], 0).repeat_interleave(width, 1)
    return values * spread[: weight.shape[0], : weight.shape[1]]
