"""Check a sync: hash every Hugging Face tensor on the trainer's side and on the engines' side.

The hash of a tensor is the sum, modulo 2**64, of a mix of every element's bits with its position in the full
tensor. Sums do not depend on how a tensor is split. So both sides are hashed in place, for any layouts, and only
one hash per piece is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece, Place, Rectangle, contiguous_strides
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows
from rlhf_mcore.protocols import SyncMismatch

CHUNK_ELEMENTS = 1 << 22  # on a GPU
HOST_ELEMENTS = 1 << 15  # mixing needs two 8-byte arrays of this size
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants of splitmix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), as signed integers.
_GAMMA, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_MASK = (1 << 64) - 1
_GAMMA_64, _MIX1_64, _MIX2_64 = (np.uint64(value & _MASK) for value in (_GAMMA, _MIX1, _MIX2))


def piece_digest(flat: Tensor, piece: Piece, hf_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Hash the elements of a piece in a flat local tensor, converted to ``dtype`` (the engine's): [] int64, on its device.

    On a GPU the call does not wait. A device-to-host copy per piece would take longer than the hashes.
    """
    view = flat.detach().as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.offset)
    if flat.device.type == "cpu":
        return torch.tensor(_to_signed(_digest_on_host(view, piece.start, hf_shape, dtype)))
    return _digest_on_device(view, piece.start, hf_shape, dtype)


def _digest_on_device(view: Tensor, start: tuple[int, ...], hf_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rows = max(CHUNK_ELEMENTS // max(prod(view.shape[1:]), 1), 1)
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    for first in range(0, len(view), rows):
        part = view[first : first + rows].to(dtype).contiguous()
        corner = (start[0] + first, *start[1:])
        total += mix(part, _positions(part.shape, corner, hf_shape, view.device)).sum()
    return total


def _positions(
    shape: Sequence[int], start: Sequence[int], hf_shape: tuple[int, ...], device: torch.device | None = None
) -> Tensor:
    """Return the position in the full tensor of every element of a rectangle."""
    position = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
    for axis, stride in enumerate(contiguous_strides(hf_shape)):
        along = torch.arange(start[axis], start[axis] + shape[axis], device=device) * stride
        position += along.view([-1 if d == axis else 1 for d in range(len(shape))])
    return position


def _digest_on_host(view: Tensor, start: tuple[int, ...], hf_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Compute ``_digest_on_device`` in blocks of rows that fit a core's cache: five times faster on a CPU."""
    if view.dim() == 1:
        view, start, hf_shape = view[:, None], (*start, 0), (*hf_shape, 1)
    total, strides = 0, contiguous_strides(hf_shape)
    rows = min(max(HOST_ELEMENTS // max(view.shape[-1], 1), 1), view.shape[-2])
    # Positions relative to the first element of a tile, and two buffers.
    relative = _positions((rows, view.shape[-1]), (0, 0), hf_shape[-2:]).numpy().view(np.uint64) * _GAMMA_64
    state, shifted = np.empty_like(relative), np.empty_like(relative)
    for leading in np.ndindex(*view.shape[:-2]):
        matrix = view[leading]
        for first in range(0, len(matrix), rows):
            part = matrix[first : first + rows].to(dtype).contiguous()
            corner = np.add(start, (*leading, first, 0)).tolist()
            offset = (sum(place * stride for place, stride in zip(corner, strides, strict=True)) + 1) * _GAMMA
            mixed, other = state[: len(part)], shifted[: len(part)]
            # numpy() would mark the storage as not resizable, and then the weights could not be freed.
            np.copyto(mixed.view(np.int64), np.from_dlpack(part.view(_BITS[part.element_size()])))
            mixed *= _MIX2_64
            mixed += relative[: len(part)]
            mixed += np.uint64(offset & _MASK)
            for distance, factor in ((30, _MIX1_64), (27, _MIX2_64)):
                mixed ^= np.right_shift(mixed, np.uint64(distance), out=other)
                mixed *= factor
            mixed ^= np.right_shift(mixed, np.uint64(31), out=other)
            total += int(mixed.sum())
    return total


def mix(part: Tensor, position: Tensor) -> Tensor:
    """Mix the bits of every element with its position [same shape] int64 in the full tensor.

    Return [same shape] int64.
    """
    state = part.view(_BITS[part.element_size()]).to(torch.int64) * _MIX2 + (position + 1) * _GAMMA
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _MIX1
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


def _to_signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def tensor_digests(
    mine: Sequence[Tensor | None],
    places: Sequence[Place],
    shapes: Mapping[str, tuple[int, ...]],
    group: dist.ProcessGroup,
) -> dict[str, int]:
    """Hash every Hugging Face tensor of one side, from the hashes of all ranks' pieces.

    This is a collective call over the group.

    ``mine`` contains the hashes of this rank's pieces, in the order of ``places``. It contains None if another
    rank that holds the same piece has its hash.

    Raises:
        SyncMismatch: two ranks with the same rectangle disagree, or the pieces do not tile a tensor.
    """
    rows = torch.tensor([[0, value is not None] for value in mine], dtype=torch.int64).view(-1, 2)
    if hashed := [value for value in mine if value is not None]:
        rows[rows[:, 1] == 1, 0] = torch.stack(hashed).cpu()  # in one transfer
    lengths = all_gather_json(len(mine), group)
    rectangles = _Rectangles(places)
    values = np.zeros(len(rectangles.known), np.int64)
    is_hashed = np.zeros(len(values), bool)
    for rank, part in enumerate(all_gather_rows(rows, group).split(lengths)):
        numbers, (hashes, is_given) = rectangles.of_rank(rank), part.numpy().T
        assert len(numbers) == len(hashes), f"rank {rank} has {len(hashes)} hashes of {len(numbers)} pieces"
        numbers, hashes = numbers[is_given == 1], hashes[is_given == 1]
        is_new = ~is_hashed[numbers]
        values[numbers[is_new][::-1]] = hashes[is_new][::-1]  # if a rectangle has several hashes, the first one counts
        is_hashed[numbers] = True
        if (differs := values[numbers] != hashes).any():
            name, rectangle = rectangles.known[numbers[differs.argmax()]]
            raise SyncMismatch(
                f"rank {rank} holds values of {name} at {rectangle.start} that differ from earlier ranks"
            )
    totals: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for (name, rectangle), value, is_there in zip(rectangles.known, values.tolist(), is_hashed.tolist(), strict=True):
        if is_there:
            totals[name] += value
            sizes[name] += rectangle.numel
    for name, size in sizes.items():
        if size != prod(shapes[name]):
            raise SyncMismatch(f"the pieces of {name} have {size} elements, the tensor has {prod(shapes[name])}")
    return {name: _to_signed(total) for name, total in totals.items()}


class _Rectangles:
    """The numbered rectangles of all places. Ranks with the same pieces share the list of their numbers."""

    def __init__(self, places: Sequence[Place]):
        numbers: dict[tuple[str, Rectangle], int] = {}
        listed: dict[Sequence[int], list[tuple[int, int]]] = defaultdict(
            list
        )  # by ranks: order and number of each piece
        order = 0
        for place in places:
            ranks = place.ranks if isinstance(place.ranks, range) else tuple(place.ranks)
            for piece in place.pieces:
                number = numbers.setdefault((piece.hf_name, piece.rectangle), len(numbers))
                listed[ranks].append((order, number))
                order += 1
        self.known = list(numbers)
        self._listed = [np.array(pairs) for pairs in listed.values()]
        self._lists: dict[int, list[int]] = defaultdict(list)  # by rank
        for position, holders in enumerate(listed):
            for rank in holders:
                self._lists[rank].append(position)
        self._joined: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}

    def of_rank(self, rank: int) -> np.ndarray[Any, Any]:
        """Return the numbers of a rank's rectangles, in the order of the places."""
        lists = tuple(self._lists[rank])
        if lists not in self._joined:
            pairs = np.concatenate([np.empty((0, 2), np.int64), *(self._listed[each] for each in lists)])
            self._joined[lists] = pairs[np.argsort(pairs[:, 0]), 1]
        return self._joined[lists]


def compare(source: Mapping[str, int], destination: Mapping[str, int]) -> None:
    """Compare every tensor of an engine with the trainer's.

    Raises:
        SyncMismatch: with the names of tensors that differ.
    """
    wrong = [name for name, value in destination.items() if source.get(name) != value]
    if wrong:
        raise SyncMismatch(f"{len(wrong)} of {len(destination)} tensors differ after the sync, among them {wrong[0]}")
