"""Safetensors files whose layout is fixed before any of their tensors is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

# Names of dtypes in a safetensors header.
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class FileLayout:
    """Header of a safetensors file, and where each tensor goes. Wider elements come first, so that all are aligned."""

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
        """Where a tensor begins in the file, in bytes."""
        return len(self.header) + self._spans[name][0]

    def flat(self, body: Tensor, name: str) -> Tensor:
        """The [numel] view of a tensor in a body [body_bytes] uint8 of the file."""
        begin, end = self._spans[name]
        return body[begin:end].view(self.types[name][0])


@dataclass(frozen=True, slots=True)
class FileImage:
    """A whole file in host memory, to be written later. ``name`` is its path inside its directory."""

    name: str
    layout: FileLayout
    body: Tensor

    @classmethod
    def empty(cls, name: str, layout: FileLayout, pinned: bool) -> FileImage:
        """Room for a file; ``pinned`` makes copies from a device fast."""
        return cls(name, layout, torch.empty(layout.body_bytes, dtype=torch.uint8, pin_memory=pinned))

    def write(self, directory: Path) -> Path:
        """Write the file, made durable, and return its path. Needs no other rank, and may run in a thread of its own."""
        path = directory / self.name
        file = create(path, self.layout)
        try:
            write_at(file, self.body.numpy().data, len(self.layout.header))
            os.fsync(file)
        finally:
            os.close(file)
        return path


def create(path: Path, layout: FileLayout) -> int:
    """Begin a file with its header. Returns the file descriptor."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    write_at(file, layout.header, 0)
    return file


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """All of it: a single write may be short."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor; one on a device is copied to the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
