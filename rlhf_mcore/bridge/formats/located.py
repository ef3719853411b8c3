"""Tensors of a ``torch.save`` file by their place in it: read once what is there, then only the bytes that are needed.

Mapping such a file leaves every page that was read in memory, and opening it again unpickles everything; reading at an offset does
neither, whatever the number of ranks and tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from rlhf_mcore.bridge.formats.foreign_pickle import load_tensors, record_offsets
from rlhf_mcore.config.errors import ConfigError

_COMPARED_BYTES = 16


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor as it lies in a file: its first element at byte ``offset``, strides in elements.

    Of a DTensor it is the local part; ``placements``, ``mesh`` (ranks by mesh coordinates) and the full shape ``whole`` say of what.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    whole: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    mesh: Tensor | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def locate(path: Path) -> dict[str, Located]:
    """The tensors of a file, by name.

    Raises:
        ConfigError: it cannot be read safely, or holds anything else.
    """
    found = load_tensors(path)
    wrong = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]} is no tensor")
    local = {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in found.items()}
    base = _base(path, local)
    return {str(name): _located(found[name], tensor, base) for name, tensor in local.items()}


def _located(value: Tensor, local: Tensor, base: int) -> Located:
    place = (local.dtype, tuple(local.shape), local.stride(), local.data_ptr() - base if local.numel() else 0)
    if not isinstance(value, DTensor):
        return Located(*place)
    return Located(*place, tuple(value.shape), tuple(value.placements), value.device_mesh.mesh)


def _base(path: Path, tensors: dict[str, Tensor]) -> int:
    """Where the file is mapped: at the distance of the first storage from the first record, which must then fit for all."""
    records = sorted(record_offsets(path))
    held = [tensor for tensor in tensors.values() if tensor.numel()]
    starts = {tensor.untyped_storage().data_ptr() for tensor in held}
    if not starts:
        return 0
    bases = [base for record in records if not (base := min(starts) - record) % ALLOCATIONGRANULARITY]
    for base in bases:
        if all(start - base in set(records) for start in starts) and all(_agrees(path, t, base) for t in held):
            return base
    raise ConfigError(f"{path}: its tensors do not lie where its records are; save it again with torch.save")


def _agrees(path: Path, tensor: Tensor, base: int) -> bool:
    """The first bytes of a storage in memory and in the file."""
    storage = tensor.untyped_storage()
    size = min(_COMPARED_BYTES, storage.nbytes())
    with path.open("rb") as file:
        there = os.pread(file.fileno(), size, storage.data_ptr() - base)
    return there == bytes(storage[:size].tolist())


def read(path: Path, tensor: Located, inside: tuple[slice, ...]) -> Tensor:
    """A rectangle of a tensor (bounds are given): only the rows that it meets are read.

    Raises:
        ConfigError: the file has become shorter.
    """
    rows = inside[0]
    shape = (rows.stop - rows.start, *tensor.shape[1:])
    if not prod(shape):
        return torch.empty(tuple(s.stop - s.start for s in inside), dtype=tensor.dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.strides, strict=True))
    buffer = bytearray(elements * tensor.dtype.itemsize)
    view, offset = memoryview(buffer), tensor.offset + rows.start * tensor.strides[0] * tensor.dtype.itemsize
    with path.open("rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], offset)
            if count == 0:
                raise ConfigError(f"{path}: ends before byte {offset}. The file is truncated.")
            view, offset = view[count:], offset + count
    return torch.frombuffer(buffer, dtype=tensor.dtype).as_strided(shape, tensor.strides)[(slice(None), *inside[1:])]
