"""Write a Hugging Face directory from the ranks of a model. Every rank writes some of the files.

A file is a place like any other, so the plan and the executor of engine syncs also send weights to the writing
ranks. A tensor is assembled in parts of at most a bucket. Each part is written when its last rectangle arrives,
and then freed. No rank ever holds a full model, a full file, or all experts of a stacked layer.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.carried import CarriedTensors
from rlhf_mcore.bridge.files.hf_files import (
    COMPANIONS,
    INDEX,
    SHARD_BYTES,
    SINGLE,
    companion_files,
    copy_companions,
    write_companions,
)
from rlhf_mcore.bridge.files.tensor_files import (
    FileImage,
    FileLayout,
    FileShard,
    ShardFiles,
    TensorTypes,
    cut_into_shards,
    write_index,
)
from rlhf_mcore.bridge.map.coverage import describe_sources, wire_dtypes
from rlhf_mcore.bridge.map.pieces import Piece, Place, contiguous_strides
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.plan.build import Plan, build_plan
from rlhf_mcore.bridge.plan.rank_plan import Bucket, RankPlan
from rlhf_mcore.bridge.run.endpoints import Destinations, LiveSources, Sources
from rlhf_mcore.bridge.run.execute import Executor
from rlhf_mcore.bridge.run.transports import GroupLinks
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.readers.adapter_files import ADAPTER_WEIGHTS


class Exporter:
    """Write a model's weights as a Hugging Face directory, repeatedly. All ranks of a group must build and call it.

    Args:
        parameters: this rank's parameters, in the dtypes of the files. Their own tensors are written unless
            ``sources`` is given.
        geometry: the model's geometry.
        companions: directories with config and tokenizer files to copy. For each file, the first directory that
            has it wins.
        group: the ranks that share the files. It must include all ranks that hold the model.
        bucket_bytes: limit of the bytes that a rank sends per bucket. The same limit applies to received bytes.
        shard_bytes: largest size of a file, unless a single tensor is larger.
        config_updates: keys of the written config.json that differ from the copied file.
        sources: tensors to write instead of the parameters' own, with the same names and shapes: merged with
            adapters, averaged or cast.
        carried: additional tensors, written into separate files.
        adapters_of: the base model's directory, if ``geometry`` describes adapters. A PEFT directory is then
            written.
        dropout: the adapters' dropout, stored for further training.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        companions: Sequence[str],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        shard_bytes: int = SHARD_BYTES,
        config_updates: Mapping[str, Any] | None = None,
        sources: Sources | None = None,
        carried: CarriedTensors | None = None,
        adapters_of: str | None = None,
        dropout: float = 0.0,
    ):
        def pieces_of(parameter: LocalParameter) -> Sequence[Piece]:
            return pieces(parameter.name, geometry, parameter.shard)

        assert (adapters_of is None) == (geometry.adapter is None), "adapters require the directory of their base model"
        self.geometry = geometry
        self._companions, self._config_updates, self._group = companions, config_updates, group
        # Resolve a run's link "latest" to its checkpoint, because the run may move the link later.
        self._base = None if adapters_of is None else os.path.realpath(adapters_of)
        self._dropout = dropout
        dtypes = wire_dtypes(parameters, pieces_of, group)
        self._types = {name: (dtypes[name], shape) for name, shape in hf_shapes(geometry).items()}
        self._carried = carried
        copies = carried.copies if carried is not None else {}
        self._types |= {name: self._types[source] for name, source in copies.items()}
        parts = {
            name: list(parts_of(name, copies.get(name, name), *self._types[name], bucket_bytes)) for name in self._types
        }
        beside = carried.types if carried is not None else {}
        self._types |= beside
        sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in self._types.items()}
        single = SINGLE
        if adapters_of is not None:
            single, shard_bytes = ADAPTER_WEIGHTS, sum(sizes.values())  # PEFT reads one file
        self.shards = cut_into_shards(sizes, group.size(), shard_bytes, beside, single)
        mine = [shard for shard in self.shards if shard.rank == group.rank()]
        self._mine = [shard for shard in mine if shard.tensors[0] not in beside]
        self._mine_beside = [shard for shard in mine if shard.tensors[0] in beside]
        self._images: list[FileImage] | None = None
        writers = {name: shard.rank for shard in self.shards for name in shard.tensors}
        self._parts = {part.name: part for name in parts if writers[name] == group.rank() for part in parts[name]}
        plan = plan_parts(describe_sources(parameters, pieces_of, group), parts, writers, bucket_bytes)
        self._rank_plan = plan.rank_view(group.rank())
        self._straight: list[_Straight] = []
        if sources is None:
            flats = {parameter.name: parameter.tensor.view(-1) for parameter in parameters}
            sources = LiveSources(flats)
            self._rank_plan, self._straight = _split(self._rank_plan, flats, self._parts)
        dtypes = {part.name: part.dtype for tensor in parts.values() for part in tensor}
        self._executor = Executor(self._rank_plan, sources, dtypes, GroupLinks(group))

    @property
    def num_bytes(self) -> int:
        """Size of the files that this rank writes, including the config and the tokenizer."""
        shards = [*self._mine, *self._mine_beside]
        layouts = [FileLayout({name: self._types[name] for name in shard.tensors}) for shard in shards]
        copied = companion_files(self._companions) if self._group.rank() == 0 else []
        return sum(layout.num_bytes for layout in layouts) + sum(path.stat().st_size for path in copied)

    @property
    def assembled_bytes(self) -> int:
        """Peak bytes of unfinished tensors in this rank's memory while it writes files."""
        return assembled_bytes(self._rank_plan, self._parts)

    def write(self, directory: Path) -> list[Path]:
        """Write this rank's files into a directory and return their paths. This is a collective call over the group.

        The call completes on every rank even if this rank's files fail. It raises the error afterwards.
        """
        destinations = _FileDestinations(directory, self._mine, self._types, self._parts, self._rank_plan)
        try:
            self._executor.run(destinations)
            destinations.write(self._straight)
        finally:
            destinations.close_files()
        if destinations.error is not None:
            raise destinations.error
        return [*(directory / shard.name for shard in self._mine), *self.write_rest(directory)]

    def snapshot(self) -> tuple[list[FileImage], Callable[[], None]]:
        """Copy this rank's weights into host memory, which the next snapshot reuses.

        This is a collective call over the group.

        Return that memory, valid until the next snapshot, and a function. The function copies the rows that this
        rank itself holds. It needs no other rank, and may run in a thread while the weights do not change.
        :meth:`write_rest` writes the other files of the directory.
        """
        if self._images is None:
            layouts = {s.name: FileLayout({name: self._types[name] for name in s.tensors}) for s in self._mine}
            self._images = [FileImage.empty(name, layout) for name, layout in layouts.items()]
        self._executor.run(destinations := _MemoryDestinations(self._images, self._parts))
        return self._images, partial(destinations.write, self._straight)

    def write_rest(self, directory: Path) -> list[Path]:
        """Write the other files of a rank, and return their paths. The call needs no other rank.

        These are the rank's files of carried tensors. The first rank also writes the index, the config and the
        tokenizer.
        """
        paths = []
        if self._carried is not None:
            paths = [self._carried.write(directory, shard) for shard in self._mine_beside]
        if self._group.rank() != 0:
            return paths
        if self._base is not None:
            return paths + write_companions(self._companions, directory, self.geometry, self._base, self._dropout)
        write_index(directory, self.shards, self._types)
        copy_companions(self._companions, directory, next(iter(self._types.values()))[0], self._config_updates)
        return paths + [directory / name for name in (INDEX, *COMPANIONS) if (directory / name).is_file()]


@dataclass(frozen=True, slots=True)
class _Straight:
    """Consecutive elements of a file's tensor that the writing rank itself holds."""

    tensor: str
    first_element: int
    elements: Tensor  # a view of a parameter: these elements in row-major order


def _split(plan: RankPlan, flats: Mapping[str, Tensor], parts: Mapping[str, Part]) -> tuple[RankPlan, list[_Straight]]:
    """Remove the parts whose rows this rank holds from a plan. They are written directly, without assembly."""
    unfinished = unfinished_parts(plan)
    straight, buckets = [], []
    for bucket in plan.buckets:
        for copy in bucket.local:
            source, target = copy.source, copy.destination
            if target.buffer not in unfinished:
                part, flat = parts[target.buffer], flats[source.buffer]
                elements = flat.as_strided(source.shape, source.strides, flat.storage_offset() + source.offset)
                straight.append(_Straight(part.tensor, part.first_element + target.offset, elements))
        buckets.append(replace(bucket, local=[copy for copy in bucket.local if copy.destination.buffer in unfinished]))
    return replace(plan, buckets=buckets), straight


class _FileDestinations(Destinations):
    """Assemble the parts of this rank's files, and write each part when it is complete.

    After an error no more parts are written, but the transfer continues, because the other ranks still send. The
    first error is kept for the caller.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[FileShard],
        types: TensorTypes,
        parts: Mapping[str, Part],
        plan: RankPlan,
    ):
        self.error: OSError | None = None
        self._parts = parts
        self._flats: dict[str, Tensor] = {}
        # Layers are alike, so the memory of written parts is reused for later parts of the same size without
        # clearing.
        self._room: dict[int, list[Tensor]] = defaultdict(list)
        self._first, self._last = spans(plan)
        self._files: ShardFiles | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = ShardFiles(directory, shards, types)
        except OSError as error:
            self.error = error

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        for name in self._first.get(bucket.index, ()):
            part = self._parts[name]
            size = prod(part.shape) * part.dtype.itemsize
            room = self._room[size].pop() if self._room[size] else torch.empty(size, dtype=torch.uint8)
            self._flats[name] = room.view(part.dtype)
        return self._flats

    def close(self, bucket: Bucket) -> None:
        for name in self._last.get(bucket.index, ()):
            flat, part = self._flats.pop(name), self._parts[name]
            if self._files is not None and self.error is None:
                try:
                    self._files.write(part.tensor, flat, part.first_element)
                except OSError as error:
                    self.error = error
            room = flat.view(torch.uint8)
            self._room[room.numel()].append(room)

    def write(self, parts: Sequence[_Straight]) -> None:
        """Write the parts that need no assembly."""
        if self._files is None or self.error is not None:
            return
        try:
            for part in parts:
                self._files.write(part.tensor, part.elements, part.first_element)
        except OSError as error:
            self.error = error

    def close_files(self) -> None:
        """Make the files durable."""
        try:
            if self._files is not None:
                self._files.close()
        except OSError as error:
            self.error = self.error or error


class _MemoryDestinations(Destinations):
    """All parts of this rank's files, at their places in memory."""

    def __init__(self, images: Sequence[FileImage], parts: Mapping[str, Part]):
        self._whole = {name: image.layout.flat(image.body, name) for image in images for name in image.layout.types}
        self._flats = {
            name: self._whole[part.tensor][part.first_element : part.first_element + prod(part.shape)]
            for name, part in parts.items()
        }

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return self._flats

    def close(self, bucket: Bucket) -> None: ...

    def write(self, parts: Sequence[_Straight]) -> None:
        """Copy the parts that need no assembly."""
        for part in parts:
            there = self._whole[part.tensor][part.first_element : part.first_element + part.elements.numel()]
            there.view(part.elements.shape).copy_(part.elements, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Part:
    """Whole rows of a file's tensor, from ``row``.

    The plan treats a part as a separate tensor, so pieces of a tensor stay in order.

    The values come from the model's tensor ``source``.
    """

    tensor: str
    source: str
    dtype: torch.dtype
    row: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.tensor}[{self.row}]"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def first_element(self) -> int:
        return self.row * prod(self.shape[1:])

    def place(self, rank: int) -> Place:
        """Return the place where the part is assembled."""
        start, strides = (0,) * len(self.shape), contiguous_strides(self.shape)
        whole = Piece(f"{self.source}[{self.row}]", start, self.shape, 0, strides)
        return Place(self.name, (whole,), (rank,), prod(self.shape))


Parts = Mapping[str, Sequence[Part]]  # by tensor


def parts_of(tensor: str, source: str, dtype: torch.dtype, shape: tuple[int, ...], limit_bytes: int) -> Iterator[Part]:
    """Cut a tensor into parts of whole rows, with at least one row per part."""
    step = max(limit_bytes // (prod(shape[1:]) * dtype.itemsize), 1)
    for row in range(0, shape[0], step):
        yield Part(tensor, source, dtype, row, (min(step, shape[0] - row), *shape[1:]))


def plan_parts(sources: Sequence[Place], parts: Parts, writers: Mapping[str, int], bucket_bytes: int) -> Plan:
    """Plan the transfer of all parts to the ranks that write their tensors."""
    needed = [part for tensor in parts.values() for part in tensor]
    sizes = {part.name: part.dtype.itemsize for part in needed if part.source == part.tensor}
    return build_plan(
        [_in_parts(place, parts) for place in sources],
        [part.place(writers[part.tensor]) for part in needed],
        element_sizes=sizes,
        bucket_bytes=bucket_bytes,
        order=list(sizes),
    )


def _in_parts(place: Place, parts: Parts) -> Place:
    """Convert a place to the coordinates of parts."""
    cut = []
    for piece in place.pieces:
        first, end = piece.start[0], piece.start[0] + piece.shape[0]
        for part in parts.get(piece.hf_name, ()):
            low, high = max(first, part.row), min(end, part.row + part.shape[0])
            if low < high:
                start, shape = (low - part.row, *piece.start[1:]), (high - low, *piece.shape[1:])
                offset = piece.offset + (low - first) * piece.strides[0]
                cut.append(Piece(part.name, start, shape, offset, piece.strides))
    return replace(place, pieces=tuple(cut))


def unfinished_parts(plan: RankPlan) -> set[str]:
    """Name the parts that a rank must assemble. It already holds each other part in contiguous runs, in any order."""
    unfinished = {
        copy.buffer for b in plan.buckets for p in b.phases for m in (*p.receives, *p.sends) for copy in m.copies
    }
    for target in (copy.destination for bucket in plan.buckets for copy in bucket.local):
        if target.strides != contiguous_strides(target.shape):
            unfinished.add(target.buffer)
    return unfinished


def assembled_bytes(plan: RankPlan, parts: Mapping[str, Part]) -> int:
    """Return the peak bytes of unfinished parts in a rank's memory."""
    unfinished, (first, last) = unfinished_parts(plan), spans(plan)
    current = most = 0
    for bucket in plan.buckets:
        current += sum(parts[name].nbytes for name in first.get(bucket.index, ()) if name in unfinished)
        most = max(most, current)
        current -= sum(parts[name].nbytes for name in last.get(bucket.index, ()) if name in unfinished)
    return most


def spans(plan: RankPlan) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """List, for each bucket, the parts that it starts and the parts that it completes."""
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
