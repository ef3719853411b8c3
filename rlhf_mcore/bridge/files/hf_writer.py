"""The files of a Hugging Face directory, written in any order: what a rank writes while training, and what `convert` writes alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import INDEX, SINGLE
from rlhf_mcore.bridge.files.tensor_files import FileLayout, TensorTypes, bytes_of, create, write_at


@dataclass(frozen=True, slots=True)
class FileShard:
    """One file: its tensors in order, and the rank that writes it."""

    name: str
    tensors: tuple[str, ...]
    rank: int


def cut_into_shards(sizes: Mapping[str, int], num_ranks: int, shard_bytes: int) -> list[FileShard]:
    """Consecutive tensors share a file up to ``shard_bytes``; files are dealt so that ranks write equal numbers of bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > shard_bytes:
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
    names = [SINGLE] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    return [FileShard(name, tuple(group), rank) for name, group, rank in zip(names, groups, writer, strict=True)]


class ShardFiles:
    """Some files of a directory, open for writing. The headers are written first; every tensor's place follows from them."""

    def __init__(self, directory: Path, shards: Sequence[FileShard], types: TensorTypes):
        self._where: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset
        self._files: list[int] = []
        for shard in shards:
            layout = FileLayout({name: types[name] for name in shard.tensors})
            file = create(directory / shard.name, layout)
            self._files.append(file)
            self._where.update({name: (file, layout.offset(name)) for name in shard.tensors})

    def write(self, name: str, part: Tensor, first_element: int = 0) -> None:
        """Write contiguous elements of a tensor, from its ``first_element`` on."""
        file, offset = self._where[name]
        write_at(file, bytes_of(part), offset + first_element * part.element_size())

    def close(self) -> None:
        """Make the files durable."""
        for file in self._files:
            os.fsync(file)
            os.close(file)
        self._files = []


def write_index(directory: Path, shards: Sequence[FileShard], types: TensorTypes) -> None:
    """The index of several files; a single file needs none."""
    if len(shards) == 1:
        return
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    total = sum(prod(types[name][1]) * types[name][0].itemsize for name in weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
