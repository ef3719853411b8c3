"""Dequantise rectangles of matrices that are published in fp8, int8, int4 or mxfp4.

transformers (fp8 in blocks), compressed-tensors and gpt-oss (mxfp4) define the formats. Results equal these
libraries' own dequantisation bit for bit. Only a rectangle's values and their scales are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.stored_formats import GROUP, Block, Parts, Shape, StoredFormat, values_per_word

_ELEMENTS = 1 << 22  # dequantised at once: 16 MiB in fp32
_VALUES = {"mxfp4": ("U8",), "fp8": ("F8_E4M3",)}  # stored dtypes
_OF_COMPRESSED = ("F8_E4M3", "I8", "I32")


class QuantisedMatrix:
    """A quantised matrix [rows, columns] of a directory; with mxfp4 [..., rows, columns].

    Args:
        stored: the directory's format.
        parts: names of the matrix's tensors.
        open_part: opens a stored tensor as safetensors' slice.
        where: directory and name, for messages.
    """

    def __init__(self, stored: StoredFormat, parts: Parts, open_part: Callable[[str], Any], where: str) -> None:
        self._stored, self.parts, self._open, self._where = stored, parts, open_part, where

    @property
    def shape(self) -> Shape:
        """Shape of the matrix.

        Raises:
            ConfigError: the shapes of its parts do not fit together.
        """
        values, scales = self._shape(self.parts.values), self._shape(self.parts.scales)
        if self._stored.method == "mxfp4":
            *outer, columns, groups = scales if len(scales) > 1 else (0, 0)
            shape: Shape = (*outer, groups * GROUP, columns)
        elif self.parts.shape:
            size = self._open(self.parts.shape)[:]
            shape = tuple(map(int, size.tolist())) if size.ndim == 1 and len(size) == 2 else ()
        else:
            shape = values
        allowed = self._stored.part_shapes(self.parts, shape) if len(shape) >= 2 else {}
        for name, found in ((self.parts.values, values), (self.parts.scales, scales)):
            if found not in allowed.get(name, ()):
                wanted = " or ".join(str(list(each)) for each in allowed.get(name, ())) or "that of a matrix"
                raise ConfigError(
                    f"{self._where}: {name} has shape {list(found)}, but config.json and the other tensors require {wanted}. "
                    "Download the model again."
                )
        return shape

    @property
    def dtype(self) -> str:
        """Dtype of the dequantised matrix: F16 if the scales are F16, else BF16. Unknown stored dtypes are named."""
        stored = self._open(self.parts.values).get_dtype()
        if stored not in _VALUES.get(self._stored.method, _OF_COMPRESSED):
            return f"{stored} with scales"
        return "F16" if self._open(self.parts.scales).get_dtype() == "F16" else "BF16"

    def read(self, where: tuple[slice, ...]) -> Tensor:
        """Read and dequantise a rectangle."""
        if self._stored.method == "mxfp4":
            return self._read_mxfp4(where)
        shape = self.shape
        block = self._stored.block(shape, self._shape(self.parts.scales))
        assert block is not None, "``shape`` has checked the scales"
        (top, bottom, _), (left, right, _) = (part.indices(size) for part, size in zip(where, shape, strict=True))
        matrix = torch.empty(
            max(bottom - top, 0), max(right - left, 0), dtype=torch.float16 if self.dtype == "F16" else torch.bfloat16
        )
        step = max(_ELEMENTS // max(right - left, 1), 1)
        for first in range(top, bottom, step):
            last = min(first + step, bottom)
            matrix[first - top : last - top] = self._dequantise(first, last, left, right, block)
        return matrix

    def _dequantise(self, top: int, bottom: int, left: int, right: int, block: Block) -> Tensor:
        scales = self._scales(top, bottom, left, right, block)
        values = self._values(top, bottom, left, right).to(scales.dtype)
        if self.parts.zeros:
            values -= self._zeros(top, bottom, left, right, block).to(scales.dtype)
        return values.mul_(scales)

    def _values(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        stored = self._open(self.parts.values)
        if not self.parts.shape:
            return stored[top:bottom, left:right]
        bits = self._bits()
        count = values_per_word(bits)
        words = stored[top:bottom, left // count : -(-right // count)]
        first = left - left // count * count
        return _unpack(words, bits)[:, first : first + right - left]

    def _bits(self) -> int:
        """Return the number of bits of a packed value. Config groups may differ, so it is found by the shape."""
        shapes = self._stored.part_shapes(self.parts, self.shape)[self.parts.values]
        return self._stored.bits[shapes.index(self._shape(self.parts.values))]

    def _scales(self, top: int, bottom: int, left: int, right: int, block: Block) -> Tensor:
        stored = self._open(self.parts.scales)
        if len(stored.get_shape()) == 2:
            scales = stored[_blocks(top, bottom, block[0]), _blocks(left, right, block[1])]
        else:
            scales = stored[...].reshape(1, 1)
        if scales.element_size() == 1:
            scales = scales.float()  # exponents (E8M0)
        return _spread(scales, top, bottom, left, right, block)

    def _zeros(self, top: int, bottom: int, left: int, right: int, block: Block) -> Tensor:
        """Read zero points. Packed ones are packed by rows."""
        stored, columns = self._open(self.parts.zeros), _blocks(left, right, block[1])
        if len(stored.get_shape()) != 2:
            zeros = stored[...].reshape(1, 1)
        elif stored.get_dtype() != "I32":
            zeros = stored[_blocks(top, bottom, block[0]), columns]
        else:
            bits = self._bits()
            count = values_per_word(bits)
            zeros = _unpack(stored[_blocks(top, bottom, count), columns].T, bits).T
            zeros = zeros[top - top // count * count :][: bottom - top]
        return _spread(zeros, top, bottom, left, right, block)

    def _shape(self, part: str) -> Shape:
        return tuple(self._open(part).get_shape())

    def _read_mxfp4(self, where: tuple[slice, ...]) -> Tensor:
        *outer, rows, columns = where
        first, end, _ = rows.indices(self.shape[-2])
        groups = _blocks(first, end, GROUP)
        blocks = self._open(self.parts.values)[(*outer, columns, groups, slice(None))]
        whole = dequantise_mxfp4(blocks, self._open(self.parts.scales)[(*outer, columns, groups)])
        return whole[..., first - groups.start * GROUP : end - groups.start * GROUP, :]


def _blocks(first: int, last: int, size: int) -> slice:
    """Return the blocks of ``size`` that contain the elements from ``first`` to ``last``."""
    return slice(first // size, -(-last // size))


def _spread(table: Tensor, top: int, bottom: int, left: int, right: int, block: Block) -> Tensor:
    """Repeat the entries of a table of blocks for every row and column that they cover, unless one entry covers all."""
    for axis, first, last, size in ((0, top, bottom, block[0]), (1, left, right, block[1])):
        if table.shape[axis] > 1:
            table = table.index_select(axis, torch.arange(first, last) // size - first // size)
    return table


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [n, m] to int32 values [n, m * values per word]. The lowest bits contain the first value."""
    shifts = torch.arange(values_per_word(bits), dtype=torch.int32) * bits
    values = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)
    return values.sub_(1 << (bits - 1)).flatten(-2)


# Weights in mxfp4: 32 four-bit values share an exponent (OCP Microscaling Formats v1.0, 2023, section 5). A matrix
# [rows, columns] is stored by columns. ``blocks`` [columns, rows / 32, 16] uint8 contains two values per byte, the
# first in the lower half. ``scales`` [columns, rows / 32] uint8 contains the exponents. The authors of gpt-oss
# store a layer's experts in this format. The table contains doubled values, and the bias is one larger than the
# exponents' bias: half of the largest power of two is still representable in bf16.
_TWICE = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
_BIAS_OF_HALVES = 128


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute matrices [..., rows, columns] bf16 from mxfp4.

    ``blocks`` are [..., columns, rows / 32, 16], and ``scales`` [..., columns, rows / 32].
    """
    values = torch.tensor([*_TWICE, *(-value for value in _TWICE)], dtype=torch.bfloat16)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2]: values of each byte
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS_OF_HALVES).bfloat16()
    matrices = pairs.view(torch.int32)[:, 0][blocks.int()].view(torch.bfloat16)  # both values move as one int32
    return matrices.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2).mT
