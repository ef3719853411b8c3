"""Write the state of an optimizer in Hugging Face coordinates: every rank writes alone, and any layout reads it.

``training/state-<rank>.safetensors`` holds the rectangles of one rank, each a tensor of its own. ``training/index.json`` has, for
each Hugging Face tensor, its rectangles and their files. Padding of the vocabulary is not stored: it is zero.

An index covers all trained tensors of the model (format 1), or those that it declares under ``covers`` (format 2): where some
weights are frozen, or only adapters are trained, the others have no state.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.tensor_files import FileImage, FileLayout, bytes_of, create, write_at
from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.rectangles import Rectangle, contiguous_strides, of_interval
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.families import embedding_name
from rlhf_mcore.families.mtp import EMBEDDING_COPY
from rlhf_mcore.geometry import ModelGeometry, Shard, StateShard
from rlhf_mcore.parallel.collectives import gather_json

STATE_INDEX = "index.json"
MASTER, SECOND_MOMENT = "master", "exp_avg_sq"
KINDS = (MASTER, "exp_avg", SECOND_MOMENT, "momentum")
FORMAT_OF_ALL = 1  # the index covers all tensors of the model
FORMAT_OF_SOME = 2  # the index declares its tensors

Described = list[tuple[str, list[str], list[int], list[int]]]  # of every region: Hugging Face name, kinds, start, shape


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a Hugging Face tensor. Its elements are back to back in a flat range, from ``offset`` on.

    ``axes`` are those of the tensor in the order in which they are stored there, from the slowest to the fastest.
    """

    hf_name: str
    rectangle: Rectangle
    offset: int
    axes: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """View the region's elements of the flat range in the rectangle's shape."""
        stored = flat[self.offset : self.offset + self.rectangle.numel]
        shape = [self.rectangle.shape[axis] for axis in self.axes]
        return stored.view(shape).permute([self.axes.index(axis) for axis in range(len(shape))])


def regions(held: Sequence[Piece], begin: int, end: int) -> list[Region]:
    """List the regions of elements ``begin`` to ``end`` of a local tensor with pieces ``held``. Padding belongs to no region."""
    listed = []
    for piece in held:
        axes = tuple(sorted(range(len(piece.shape)), key=lambda axis: -piece.strides[axis]))
        shape = tuple([piece.shape[axis] for axis in axes])
        # Whatever way Megatron cuts a tensor, a piece of it is one block of the local one, if need be transposed.
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
    """Tell whether a rank writes the state of its part of a parameter: of tensor-parallel replicas the first does.

    An embedding that the last stage needs too has two owners under pipeline parallelism; the first stage writes it.
    """
    if name == EMBEDDING_COPY:
        return False
    parts = pieces(name, geometry, shard)
    if name == "output_layer.weight" and any(piece.hf_name == embedding_name(geometry) for piece in parts):
        return False
    return shard.rank == 0 or parts != pieces(name, geometry, replace(shard, rank=0))


class RankState:
    """One rank's share of the state to write: tensors by name, and the layout of their file."""

    def __init__(self, shards: Sequence[StateShard], geometry: ModelGeometry):
        self.described: Described = []
        self._tensors: dict[str, Tensor] = {}
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
        self.layout = FileLayout({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self._tensors.items()})

    def write(self, path: Path) -> None:
        """Write the file, tensor by tensor; made durable."""
        file = create(path, self.layout)
        try:
            for key, tensor in self._tensors.items():
                write_at(file, bytes_of(tensor), self.layout.offset(key))
            os.fsync(file)
        finally:
            os.close(file)

    def copy_to(self, image: FileImage) -> None:
        """Copy all tensors into the image of the file. Copies from a device must be waited for."""
        for key, tensor in self._tensors.items():
            image.layout.flat(image.body, key).view(tensor.shape).copy_(tensor, non_blocking=True)


def state_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"state-{rank:05d}.safetensors"


def region_key(kind: str, hf_name: str, rectangle: Rectangle) -> str:
    """Name of a rectangle's tensor, such as ``exp_avg/model.norm.weight[0:64]``."""
    spans = ",".join(f"{begin}:{begin + size}" for begin, size in zip(*rectangle, strict=True))
    return f"{kind}/{hf_name}[{spans}]"


def gather_index(
    described: Described,
    geometry: ModelGeometry,
    scalars: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    covers: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Gather the index of all ranks' files on the group's first rank. Returns None on the others. Collective over the group.

    ``scalars`` are the same on all ranks that write something, and may be None on the others. ``covers`` as in :func:`make_index`.
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
    """Make the index of the regions that all ranks have described.

    ``covers`` declares the Hugging Face tensors that have state; None: all of the model that are trained.

    Raises:
        ValueError: the ranks' regions do not cover a declared tensor exactly once, or are of a tensor that is not declared. This is
            ours, not the user's, to put right.
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
            raise ValueError(f"{name}: the ranks hold {stored} elements of its state, it has {prod(shapes[name])}")
    index = {"format": FORMAT_OF_ALL, "files": files, "tensors": tensors, "scalars": dict(scalars)}
    return index if covers is None else {**index, "format": FORMAT_OF_SOME, "covers": list(shapes)}
