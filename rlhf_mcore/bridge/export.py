"""From the ranks of a model to a Hugging Face directory, through the planner: every rank writes some of the files.

A file is a place like any other. The same plan and the same executor that carry weights to an engine carry them to the ranks that
write; a tensor is written when its last rectangle has come, and forgotten. No rank ever holds a full model, nor a full file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.describe import describe_sources, wire_dtypes
from rlhf_mcore.bridge.execute import Executor
from rlhf_mcore.bridge.hf_files import SHARD_BYTES, copy_companions
from rlhf_mcore.bridge.hf_writer import ShardFiles, cut_into_shards, write_index
from rlhf_mcore.bridge.places import Place
from rlhf_mcore.bridge.plan import build_plan
from rlhf_mcore.bridge.rank_plan import RankPlan
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.rules import hf_shapes, pieces
from rlhf_mcore.bridge.strided import contiguous_strides
from rlhf_mcore.bridge.tensor_files import TensorTypes
from rlhf_mcore.types import LocalParameter, ModelGeometry


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
        dtypes = wire_dtypes(parameters, pieces_of)
        self._types = {name: (dtypes[name], shape) for name, shape in hf_shapes(geometry).items()}
        sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in self._types.items()}
        self.shards = cut_into_shards(sizes, dist.get_world_size(), shard_bytes)
        plan = build_plan(
            describe_sources(parameters, pieces_of),
            [_place(name, self._types[name][1], shard.rank) for shard in self.shards for name in shard.tensors],
            element_sizes={name: dtype.itemsize for name, dtype in dtypes.items()},
            bucket_bytes=bucket_bytes,
            order=list(self._types),
        )
        self._rank_plan = plan.rank_view(dist.get_rank())
        flats = {parameter.name: parameter.tensor.view(-1) for parameter in parameters}
        self._executor = Executor(self._rank_plan, flats, dtypes)

    def save(self, directory: Path) -> None:
        """Write the directory, whole or not at all. Collective over the world."""
        temporary = directory.with_name(f".{directory.name}.partial")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        files = ShardFiles(temporary, [s for s in self.shards if s.rank == dist.get_rank()], self._types)
        try:
            self._executor.run(_FileLanding(files, self._types, self._rank_plan))
        finally:
            files.close()
        dist.barrier()
        if dist.get_rank() == 0:
            self._finish(temporary, directory)
        dist.barrier()

    def _finish(self, temporary: Path, directory: Path) -> None:
        write_index(temporary, self.shards, self._types)
        copy_companions(self._companions, temporary, next(iter(self._types.values()))[0])
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)


def _place(name: str, shape: tuple[int, ...], rank: int) -> Place:
    whole = Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape))
    return Place(name, (whole,), (rank,), prod(shape))


class _FileLanding:
    """Assembles the tensors of this rank's files and writes each to its place when it is complete."""

    def __init__(self, files: ShardFiles, types: TensorTypes, plan: RankPlan):
        self._files, self._types = files, types
        self._flats: dict[str, Tensor] = {}
        self._first, self._last = _spans(plan)

    def open(self, bucket: int) -> Mapping[str, Tensor]:
        for name in self._first.get(bucket, ()):
            dtype, shape = self._types[name]
            self._flats[name] = torch.empty(prod(shape), dtype=dtype)
        return self._flats

    def close(self, bucket: int) -> None:
        for name in self._last.get(bucket, ()):
            self._files.write(name, self._flats.pop(name))


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
