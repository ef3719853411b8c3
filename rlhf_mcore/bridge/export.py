"""From the ranks of a model to a Hugging Face directory, through the planner: every rank writes some of the files.

A file is a place like any other. The same plan and the same executor that carry weights to an engine carry them to the ranks that
write; a tensor is written when its last rectangle has come, and forgotten. No rank ever holds a full model, nor a full file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.describe import describe_sources, wire_dtypes
from rlhf_mcore.bridge.execute import Executor
from rlhf_mcore.bridge.hf_files import INDEX, SHARD_BYTES, SINGLE, copy_companions
from rlhf_mcore.bridge.places import Place
from rlhf_mcore.bridge.plan import build_plan
from rlhf_mcore.bridge.rank_plan import RankPlan
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.rules import hf_shapes, pieces
from rlhf_mcore.bridge.strided import contiguous_strides
from rlhf_mcore.types import LocalParameter, ModelGeometry

# Names of dtypes in a safetensors header.
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class FileShard:
    """One file: its tensors in order, and the rank that writes it."""

    name: str
    tensors: tuple[str, ...]
    rank: int


class Exporter:
    """Writes a model's weights as a Hugging Face directory, again and again. Built and called collectively.

    Args:
        parameters: the trained tensors of this rank.
        geometry: of the model.
        companions: directories whose config and tokenizer files are copied, the first that has a file wins.
        bucket_bytes: limit of what a rank sends, and of what it receives, at a time.
        shard_bytes: largest size of a file, unless a single tensor is larger.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        companions: Sequence[str],
        *,
        bucket_bytes: int,
        shard_bytes: int = SHARD_BYTES,
    ):
        def pieces_of(parameter: LocalParameter) -> Sequence[Piece]:
            return pieces(parameter.name, geometry, parameter.shard)

        self._companions = companions
        self._shapes = hf_shapes(geometry)
        self._dtypes = wire_dtypes(parameters, pieces_of)
        sizes = {name: prod(shape) * self._dtypes[name].itemsize for name, shape in self._shapes.items()}
        self.shards = cut_into_shards(sizes, dist.get_world_size(), shard_bytes)
        plan = build_plan(
            describe_sources(parameters, pieces_of),
            [_place(name, self._shapes[name], shard.rank) for shard in self.shards for name in shard.tensors],
            element_sizes={name: dtype.itemsize for name, dtype in self._dtypes.items()},
            bucket_bytes=bucket_bytes,
            order=list(self._shapes),
        )
        self._rank_plan = plan.rank_view(dist.get_rank())
        flats = {parameter.name: parameter.tensor.view(-1) for parameter in parameters}
        self._executor = Executor(self._rank_plan, flats, self._dtypes)

    def save(self, directory: Path) -> None:
        """Write the directory, whole or not at all. Collective over the world."""
        temporary = directory.with_name(f".{directory.name}.partial")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        mine = [shard for shard in self.shards if shard.rank == dist.get_rank()]
        landing = _FileLanding(temporary, mine, self._shapes, self._dtypes, self._rank_plan)
        try:
            self._executor.run(landing)
        finally:
            landing.close_files()
        dist.barrier()
        if dist.get_rank() == 0:
            self._finish(temporary, directory)
        dist.barrier()

    def _finish(self, temporary: Path, directory: Path) -> None:
        if len(self.shards) > 1:
            total = sum(prod(shape) * self._dtypes[name].itemsize for name, shape in self._shapes.items())
            weight_map = {name: shard.name for shard in self.shards for name in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        copy_companions(self._companions, temporary, next(iter(self._dtypes.values())))
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)


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


def _place(name: str, shape: tuple[int, ...], rank: int) -> Place:
    whole = Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape))
    return Place(name, (whole,), (rank,), prod(shape))


class _FileLanding:
    """Assembles the tensors of this rank's files and writes each to its place when it is complete."""

    def __init__(
        self,
        directory: Path,
        shards: Sequence[FileShard],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        plan: RankPlan,
    ):
        self._shapes, self._dtypes = shapes, dtypes
        self._flats: dict[str, Tensor] = {}
        self._first, self._last = _spans(plan)
        self._where: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset
        self._files: list[int] = []
        for shard in shards:
            self._create(directory / shard.name, shard)

    def _create(self, path: Path, shard: FileShard) -> None:
        """Write the header; every tensor's offset follows from it."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in shard.tensors:
            begin, end = end, end + prod(self._shapes[name]) * self._dtypes[name].itemsize
            header[name] = {
                "dtype": _CODES[self._dtypes[name]],
                "shape": list(self._shapes[name]),
                "data_offsets": [begin, end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._files.append(file)
        _write(file, len(encoded).to_bytes(8, "little") + encoded, 0)
        offset = 8 + len(encoded)
        for name in shard.tensors:
            self._where[name] = (file, offset)
            offset += prod(self._shapes[name]) * self._dtypes[name].itemsize

    def open(self, bucket: int) -> Mapping[str, Tensor]:
        for name in self._first.get(bucket, ()):
            self._flats[name] = torch.empty(prod(self._shapes[name]), dtype=self._dtypes[name])
        return self._flats

    def close(self, bucket: int) -> None:
        for name in self._last.get(bucket, ()):
            flat = self._flats.pop(name)
            file, offset = self._where[name]
            _write(file, flat.view(torch.uint8).numpy().data, offset)

    def close_files(self) -> None:
        """Make the files durable."""
        for file in self._files:
            os.fsync(file)
            os.close(file)
        self._files = []


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    """All of it: a single write may be short."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _spans(plan: RankPlan) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """For each bucket the buffers that it begins, and those that it completes."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for bucket in plan.buckets:
        for name in bucket.destination_buffers:
            first.setdefault(name, bucket.index)
            last[name] = bucket.index
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name in first:
        begins.setdefault(first[name], []).append(name)
        ends.setdefault(last[name], []).append(name)
    return begins, ends
