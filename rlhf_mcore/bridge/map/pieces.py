"""Describe the parts of Hugging Face tensors that ranks store. Pure Python, except :func:`view` of a real tensor.

Ranks with the same tensor, pipeline and expert coordinates hold the same pieces at the same local views, for any
data-parallel coordinate. They share one description, with their ranks as an arithmetic progression. So the
description of 16,384 ranks is no longer than the description of one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from rlhf_mcore.bridge.map.rectangles import Rectangle

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
    def rectangle(self) -> Rectangle:
        return Rectangle(self.start, self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the rectangle as an index into the full Hugging Face tensor."""
        return self.rectangle.slices()


@dataclass(frozen=True, slots=True)
class Place:
    """A local tensor that each of ``ranks`` stores. ``ranks`` are ascending (a range for regular layouts).

    ``numel`` is the size of the local tensor, or 0 if it is unknown. ``padding`` lists half-open intervals of
    elements that no Hugging Face tensor fills. Only :func:`rlhf_mcore.bridge.map.coverage.check_coverage` uses
    both.
    """

    buffer: str
    pieces: tuple[Piece, ...]
    ranks: Sequence[int]
    numel: int = 0
    padding: tuple[tuple[int, int], ...] = ()


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """View the part of a contiguous local tensor that a piece describes.

    The view is writable and has shape ``piece.shape``.
    """
    assert tensor.is_contiguous(), piece.hf_name
    return tensor.as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)
