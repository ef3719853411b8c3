"""Pieces: rectangles in Hugging Face coordinates together with the strided view of a local tensor that holds them.

Pure Python; a view of a real tensor is taken in :func:`view`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """``hf_name[start : start + shape]`` is in a local tensor at ``offset`` with ``strides`` (both in elements)."""

    hf_name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The rectangle as an index into the full Hugging Face tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True))


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """The part of a contiguous local tensor that a piece describes, as a writable view of shape ``piece.shape``."""
    assert tensor.is_contiguous(), piece.hf_name
    return tensor.as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)
