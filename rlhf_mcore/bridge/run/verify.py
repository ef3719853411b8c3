"""Proof that a sync was whole: a hash of every Hugging Face tensor on the trainer's side and on the engines' side.

The hash of a tensor is the sum, modulo 2**64, of a mix of every element's bits with its position in the full tensor. Sums do not
depend on how a tensor is cut, so both sides are hashed where they are stored, whatever their layouts, and
nothing is gathered but a hash for every piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rectangles import Rectangle
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.protocols import SyncMismatch

CHUNK_ELEMENTS = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_GAMMA, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def piece_digest(flat: Tensor, piece: Piece, hf_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Hash of the elements that a flat local tensor holds of a piece, as they are in ``dtype`` (the engine's): [] int64, beside them.

    Nobody waits for it: on a GPU a transfer for each piece would take longer than the hashes.
    """
    view = flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.offset)
    rows = max(CHUNK_ELEMENTS // max(prod(piece.shape[1:]), 1), 1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, piece.shape[0], rows):
        part = view[first : first + rows].to(dtype).contiguous()
        start = (piece.start[0] + first, *piece.start[1:])
        total += _mix(part, start, hf_shape).sum()
    return total


def _mix(part: Tensor, start: tuple[int, ...], hf_shape: tuple[int, ...]) -> Tensor:
    state = part.view(_BITS[part.element_size()]).to(torch.int64)
    position = torch.zeros(part.shape, dtype=torch.int64, device=part.device)
    stride = 1
    for axis in reversed(range(part.dim())):
        along = torch.arange(start[axis], start[axis] + part.shape[axis], device=part.device) * stride
        position += along.view([-1 if d == axis else 1 for d in range(part.dim())])
        stride *= hf_shape[axis]
    state = state * _MIX2 + (position + 1) * _GAMMA
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _MIX1
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


def _to_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def tensor_digests(
    mine: Sequence[Tensor | None],
    places: Sequence[Place],
    shapes: Mapping[str, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> dict[str, int]:
    """Hash every Hugging Face tensor of one side, from the hashes of all ranks' pieces. Collective over the group.

    ``mine`` are those of this rank's pieces, in the order of ``places``; None where another rank that holds the piece has its hash.

    Raises:
        SyncMismatch: two ranks that hold the same rectangle disagree, or the pieces do not tile a tensor.
    """
    rows = torch.tensor([[0, value is not None] for value in mine], dtype=torch.int64).view(-1, 2)
    if hashed := [value for value in mine if value is not None]:
        rows[rows[:, 1] == 1, 0] = torch.stack(hashed).cpu()  # all in one transfer
    lengths = all_gather_json(len(mine), group)
    values: dict[tuple[str, Rectangle], int] = {}
    for rank, part in enumerate(all_gather_rows(rows, group).split(lengths)):
        own = (piece for place in places if rank in place.ranks for piece in place.pieces)
        for piece, (value, is_given) in zip(own, part.tolist(), strict=True):
            if is_given and values.setdefault((piece.hf_name, piece.rectangle), value) != value:
                raise SyncMismatch(
                    f"rank {rank} holds other values of {piece.hf_name} at {piece.start} than ranks before it"
                )
    totals: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for (name, rectangle), value in values.items():
        totals[name] += value
        sizes[name] += rectangle.numel
    for name, size in sizes.items():
        if size != prod(shapes[name]):
            raise SyncMismatch(f"the pieces of {name} have {size} elements, the tensor has {prod(shapes[name])}")
    return {name: _to_signed(total) for name, total in totals.items()}


def compare(source: Mapping[str, int], destination: Mapping[str, int]) -> None:
    """Compare every tensor of an engine with the trainer's.

    Raises:
        SyncMismatch: naming the tensors that differ.
    """
    wrong = [name for name, value in destination.items() if source.get(name) != value]
    if wrong:
        raise SyncMismatch(f"{len(wrong)} of {len(destination)} tensors differ after the sync, among them {wrong[0]}")
