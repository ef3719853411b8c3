"""Pieces and places: where parts of Hugging Face tensors are stored on ranks. Pure Python; :func:`view` takes a view of a real tensor.

Ranks of the same layout position (same tensor, pipeline and expert coordinates; any data-parallel coordinate) hold the same pieces
at the same local views. They are described once, with their ranks as an arithmetic progression, so the description of 16,384
ranks is no longer than that of one replica.
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
    """One local tensor as it is stored on each of ``ranks`` (ascending; a range where the layout is regular).

    ``numel`` counts the local tensor's elements; ``padding`` lists half-open intervals of them that no Hugging Face tensor fills.
    Both are used by :func:`rlhf_mcore.bridge.map.coverage.check_coverage` only; ``numel`` 0 means that the size is not known.
    """

    buffer: str
    pieces: tuple[Piece, ...]
    ranks: Sequence[int]
    numel: int = 0
    padding: tuple[tuple[int, int], ...] = ()


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """View the part of a contiguous local tensor that a piece describes. The view is writable and has shape ``piece.shape``."""
    assert tensor.is_contiguous(), piece.hf_name
    return tensor.as_strided(piece.shape, piece.strides, tensor.storage_offset() + piece.offset)
