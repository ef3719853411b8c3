"""Write an optimizer's state in Hugging Face coordinates.

Every rank writes its own file, and any layout can read them.

``training/state-<rank>.safetensors`` contains the rectangles of one rank, each as a separate tensor.
``training/index.json`` lists, for each Hugging Face tensor, its rectangles and their files. Vocabulary padding is
not stored, because it is zero.

An index covers all trained tensors of the model (format 1), or the tensors that it declares under ``covers``
(format 2). Frozen weights have no state. If only adapters are trained, only adapters have state.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.tensor_files import FileImage, FileLayout, bytes_of, create, write_at
from rlhf_mcore.bridge.map.pieces import Piece, Rectangle, contiguous_strides, of_interval
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.families import embedding_name
from rlhf_mcore.families.mtp import EMBEDDING_COPY
from rlhf_mcore.geometry import ModelGeometry, Shard, StateShard
from rlhf_mcore.masters import SplitMaster
from rlhf_mcore.parallel.collectives import gather_json

STATE_INDEX = "index.json"
MASTER, SECOND_MOMENT = "master", "exp_avg_sq"
KINDS = (MASTER, "exp_avg", SECOND_MOMENT, "momentum")
FORMAT_OF_ALL = 1  # the index covers all tensors of the model
FORMAT_OF_SOME = 2  # the index declares its tensors

Described = list[tuple[str, list[str], list[int], list[int]]]  # per region: Hugging Face name, kinds, start, shape


Flat = TypeVar("Flat", bound=Tensor | SplitMaster)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a Hugging Face tensor. Its elements are consecutive in a flat range, from ``offset``.

    ``axes`` lists the tensor's axes in their storage order, from slowest to fastest.
    """

    hf_name: str
    rectangle: Rectangle
    offset: int
    axes: tuple[int, ...]

    def of(self, flat: Flat) -> Flat:
        """View the region's elements of the flat range in the rectangle's shape."""
        stored: Any = flat[self.offset : self.offset + self.rectangle.numel]
        shape = [self.rectangle.shape[axis] for axis in self.axes]
        view: Flat = stored.view(shape).permute([self.axes.index(axis) for axis in range(len(shape))])
        return view


def regions(held: Sequence[Piece], begin: int, end: int) -> list[Region]:
    """List the regions of elements ``begin`` to ``end`` of a local tensor with pieces ``held``.

    No region contains padding.
    """
    listed = []
    for piece in held:
        axes = tuple(sorted(range(len(piece.shape)), key=lambda axis: -piece.strides[axis]))
        shape = tuple([piece.shape[axis] for axis in axes])
        # For every split in Megatron, a piece is one block of the local tensor, possibly transposed.
        assert tuple([piece.strides[axis] for axis in axes]) == contiguous_strides(shape), piece
        low, high = max(begin, piece.offset), min(end, piece.offset + piece.numel)
        position = low - begin
        for part in of_interval(shape, low - piece.offset, high - piece.offset):
            start, extent = list(piece.start), list(piece.shape)
            for axis, first, size in zip(axes, *part, strict=True):
                start[axis] += first
                extent[axis] = size
            listed.append(Region(piece.hf_name, Rectangle(tuple(start), tuple(extent)), position, axes))
            position += part.numel
    return listed


def writes(name: str, geometry: ModelGeometry, shard: Shard) -> bool:
    """Return whether a rank writes the state of its part of a parameter.

    The first tensor-parallel replica writes.

    Under pipeline parallelism a tied embedding is on the first and last stages. The first stage writes it.
    """
    if name == EMBEDDING_COPY:
        return False
    parts = pieces(name, geometry, shard)
    if name == "output_layer.weight" and any(piece.hf_name == embedding_name(geometry) for piece in parts):
        return False
    return shard.rank == 0 or parts != pieces(name, geometry, replace(shard, rank=0))


class RankState:
    """A rank's share of the state to write: tensors by name, and the layout of their file."""

    def __init__(self, shards: Sequence[StateShard], geometry: ModelGeometry):
        self.described: Described = []
        self._tensors: dict[str, Tensor | SplitMaster] = {}
        for shard in shards:
            if not writes(shard.name, geometry, shard.shard):
                continue
            kinds = [kind for kind in KINDS if kind in shard.tensors]
            parts = regions(pieces(shard.name, geometry, shard.shard), shard.start, shard.stop)
            for region in parts:
                start, shape = region.rectangle
                self.described.append((region.hf_name, kinds, list(start), list(shape)))
            for kind, tensor in shard.tensors.items():
                self._tensors |= {region_key(kind, r.hf_name, r.rectangle): r.of(tensor) for r in parts}
        self.layout = FileLayout({key: (torch.float32, tuple(tensor.shape)) for key, tensor in self._tensors.items()})

    def write(self, path: Path) -> None:
        """Write the file tensor by tensor, and make it durable."""
        file = create(path, self.layout)
        try:
            for key, tensor in self._tensors.items():
                write_at(file, bytes_of(tensor.float()), self.layout.offset(key))
            os.fsync(file)
        finally:
            os.close(file)

    def copy_to(self, image: FileImage) -> None:
        """Copy all tensors into the file's image. The caller must wait for copies from a device."""
        for key, tensor in self._tensors.items():
            image.layout.flat(image.body, key).view(tensor.shape).copy_(tensor.float(), non_blocking=True)


def state_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"state-{rank:05d}.safetensors"


def region_key(kind: str, hf_name: str, rectangle: Rectangle) -> str:
    """Return the name of a rectangle's tensor, such as ``exp_avg/model.norm.weight[0:64]``."""
    spans = ",".join(f"{begin}:{begin + size}" for begin, size in zip(*rectangle, strict=True))
    return f"{kind}/{hf_name}[{spans}]"


def gather_index(
    described: Described,
    geometry: ModelGeometry,
    scalars: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    covers: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Gather the index of all ranks' files on the group's first rank. Return None on other ranks.

    This is a collective call over the group. ``scalars`` must be equal on all ranks that write regions; it may be
    None on others. ``covers`` is as in :func:`make_index`.
    """
    parts = gather_json([described, scalars], group)
    if not parts:
        return None
    shared: Mapping[str, Any] = next((theirs for regions_of_rank, theirs in parts if regions_of_rank), {})
    return make_index({rank: listed for rank, (listed, _) in enumerate(parts)}, geometry, shared, covers)


def make_index(
    described: Mapping[int, Described],
    geometry: ModelGeometry,
    scalars: Mapping[str, Any],
    covers: Collection[str] | None = None,
) -> dict[str, Any]:
    """Build the index of the regions that all ranks have described.

    ``covers`` declares the Hugging Face tensors with state; None: all trained tensors of the model.

    Raises:
        ValueError: the ranks' regions do not cover a declared tensor exactly once, or a region's tensor is not
            declared. Both are bugs in this package, not user errors.
    """
    shapes = hf_shapes(geometry, trained=True)
    if covers is not None:
        if unknown := set(covers) - shapes.keys():
            raise ValueError(f"{min(unknown)} is not a tensor of this model")
        shapes = {name: shape for name, shape in shapes.items() if name in covers}
    tensors: dict[str, dict[str, Any]] = {name: {"shape": list(shape), "regions": []} for name, shape in shapes.items()}
    files = [state_file(rank) for rank, listed in sorted(described.items()) if listed]
    for rank, listed in described.items():
        for name, kinds, start, shape in listed:
            if name not in tensors:
                raise ValueError(f"rank {rank} holds state of {name}, which the index does not cover")
            entry = tensors[name]
            if entry.setdefault("kinds", kinds) != kinds:
                raise ValueError(f"{name}: kinds {kinds} on rank {rank}, {entry['kinds']} on another")
            entry["regions"].append([files.index(state_file(rank)), start, shape])
    for name, entry in tensors.items():
        stored = sum(prod(shape) for _, _, shape in entry["regions"])
        if stored != prod(shapes[name]):
            raise ValueError(f"{name}: the ranks hold {stored} elements of its state instead of {prod(shapes[name])}")
    index = {"format": FORMAT_OF_ALL, "files": files, "tensors": tensors, "scalars": dict(scalars)}
    return index if covers is None else {**index, "format": FORMAT_OF_SOME, "covers": list(shapes)}
