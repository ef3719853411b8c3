"""Write safetensors files with a fixed layout: tensors in any order, single files or directories."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import INDEX, SINGLE
from rlhf_mcore.platform import current_platform

# Names of dtypes in a safetensors header.
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

_PART_BYTES = 8 * 2**20

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class FileLayout:
    """Header of a safetensors file, and the place of each tensor. Wider elements come first, so that all are aligned."""

    def __init__(self, tensors: TensorTypes):
        self.types = dict(sorted(tensors.items(), key=lambda item: -item[1][0].itemsize))
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in self.types.items():
            begin, end = end, end + prod(shape) * dtype.itemsize
            self._spans[name] = (begin, end)
            content[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        encoded = json.dumps(content, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = len(encoded).to_bytes(8, "little") + encoded
        self.body_bytes = end

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.body_bytes

    def offset(self, name: str) -> int:
        """Return the tensor's first byte in the file."""
        return len(self.header) + self._spans[name][0]

    def flat(self, body: Tensor, name: str) -> Tensor:
        """Return the [numel] view of a tensor in a body [body_bytes] uint8 of the file."""
        begin, end = self._spans[name]
        return body[begin:end].view(self.types[name][0])


@dataclass(frozen=True, slots=True)
class FileImage:
    """A whole file in host memory, to be written later. ``name`` is its path inside its directory."""

    name: str
    layout: FileLayout
    body: Tensor

    @classmethod
    def empty(cls, name: str, layout: FileLayout) -> FileImage:
        """Allocate memory for a file. Copies from the device to this memory are fast."""
        return cls(name, layout, current_platform().host_buffer(layout.body_bytes))

    def write(self, directory: Path) -> Path:
        """Write the file, make it durable, and return its path.

        The call needs no other rank, and may run in a separate thread.
        """
        path = directory / self.name
        file = create(path, self.layout)
        try:
            write_at(file, self.body.numpy().data, len(self.layout.header))
            os.fsync(file)
        finally:
            os.close(file)
        return path


def create(path: Path, layout: FileLayout) -> int:
    """Create a file and write its header. Return the file descriptor."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_at(file, layout.header, 0)
    except OSError:
        os.close(file)
        raise
    return file


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data. A single write may be short.

    Large data is passed to the disk part by part, so the disk writes one part while the next is copied. Then an
    fsync has little to wait for. For unwritten pages, POSIX_FADV_DONTNEED starts writing and drops nothing
    (mm/fadvise.c in Linux).
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view[:_PART_BYTES], offset)
        if written == _PART_BYTES:
            os.posix_fadvise(file, offset, written, os.POSIX_FADV_DONTNEED)
        view, offset = view[written:], offset + written


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor. A tensor on a device is copied to the host."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    # numpy() would mark the storage as not resizable, so a live tensor could not be moved off the device.
    array: Any = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    array.tensor = flat  # keeps the tensor alive as long as its bytes are used
    return memoryview(array).cast("B")


@dataclass(frozen=True, slots=True)
class FileShard:
    """A file: its tensors in order, and the rank that writes it."""

    name: str
    tensors: tuple[str, ...]
    rank: int


def cut_into_shards(
    sizes: Mapping[str, int], num_ranks: int, shard_bytes: int, apart: Collection[str] = (), single: str = SINGLE
) -> list[FileShard]:
    """Pack consecutive tensors into files of up to ``shard_bytes``, and give ranks nearly equal numbers of bytes.

    Tensors in ``apart`` share files only with each other. ``single`` is the file's name if there is only one.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and (filled + size > shard_bytes or (name in apart) != (groups[-1][0] in apart)):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    totals = [sum(sizes[name] for name in group) for group in groups]
    load = [0] * num_ranks
    writer = [0] * len(groups)
    for place in sorted(range(len(groups)), key=lambda k: -totals[k]):
        writer[place] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        load[writer[place]] += totals[place]
    count = len(groups)
    names = [single] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    return [FileShard(name, tuple(group), rank) for name, group, rank in zip(names, groups, writer, strict=True)]


class ShardFiles:
    """Some files of a directory, open for writing. The headers are written first, and determine each tensor's place."""

    def __init__(self, directory: Path, shards: Sequence[FileShard], types: TensorTypes):
        self._where: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset
        self._files: list[int] = []
        try:
            for shard in shards:
                layout = FileLayout({name: types[name] for name in shard.tensors})
                file = create(directory / shard.name, layout)
                self._files.append(file)
                self._where.update({name: (file, layout.offset(name)) for name in shard.tensors})
        except OSError:
            self._close()
            raise

    def write(self, name: str, part: Tensor, first_element: int = 0) -> None:
        """Write contiguous elements of a tensor, starting at ``first_element``."""
        file, offset = self._where[name]
        write_at(file, bytes_of(part), offset + first_element * part.element_size())

    def close(self) -> None:
        """Make the files durable and close them, even after a failure."""
        try:
            for file in self._files:
                os.fsync(file)
        finally:
            self._close()

    def _close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            os.close(file)


def write_index(directory: Path, shards: Sequence[FileShard], types: TensorTypes) -> None:
    """Write the index of several files. A single file needs no index."""
    if len(shards) == 1:
        return
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    total = sum(prod(types[name][1]) * types[name][0].itemsize for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
