"""Merge sharded PyTorch checkpoints of other trainers (``model_world_size_X_rank_Y.pt``) by placement.

Three kinds of tensors are supported. For a DTensor, the placements give a rank's rectangle. A flat shard is a
rank's interval of the flattened tensor. A whole tensor is on every rank. Other kinds are rejected, because a
dimension is never guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlhf_mcore.bridge.files.formats.foreign_tensors import ForeignTensor, drop_pages, load_file
from rlhf_mcore.bridge.files.formats.source import BUFFERS
from rlhf_mcore.bridge.files.formats.tiles import Index, Rows, Tile, Tiled, TiledSource, check_tiles, grid_tiles
from rlhf_mcore.bridge.files.hf_files import inside
from rlhf_mcore.bridge.map.pieces import Rectangle
from rlhf_mcore.bridge.map.rules import hf_shapes, in_memory, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import embedding_name
from rlhf_mcore.geometry import ModelGeometry

COMPANIONS = "huggingface"  # such checkpoints store config.json and the tokenizer here
_NAME = re.compile(r"(model|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt", re.ASCII)
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
_COMPARED_ELEMENTS = 2**21
_NAMED = 5  # missing files to name in a message
_Interval = tuple[int, int]  # start, length


class _Ranks:
    """The tensors in the files of all ranks, by rank and name."""

    def __init__(self, directory: Path, *, check: bool):
        self.directory = directory
        self.files = _find_files(directory)
        self.tensors = [
            {_WRAPPERS.sub("", name): tensor for name, tensor in load_file(path, check=check).items()}
            for path in self.files
        ]

    def release(self) -> None:
        """Free the pages that were read."""
        drop_pages(tensor.local for tensors in self.tensors for tensor in tensors.values())


def open_fsdp(directory: Path, companions: Path, geometry: ModelGeometry, *, check: bool = True) -> TiledSource:
    """Open a sharded checkpoint as Hugging Face tensors. With ``check``, compare the checksums of all files.

    Raises:
        ConfigError: a rank's file is missing or unsafe, ranks disagree, or parts do not form whole tensors.
    """
    ranks = _Ranks(directory, check=check)
    shapes = hf_shapes(geometry)
    if geometry.tied_embeddings:  # modules contain the matrix under both names
        shapes["lm_head.weight"] = shapes[embedding_name(geometry)]
    tensors: dict[str, Tiled] = {}
    rows: defaultdict[str, list[Rows]] = defaultdict(list)
    for name in _common_names(ranks):
        if name.endswith(BUFFERS):
            continue
        runs = list(_rows(name, geometry, shapes, directory))
        stack = (geometry.num_experts,) if runs[0][1].lead else ()
        width = shapes[runs[0][0]][1:]
        count = sum(run.count for _, run in runs if run.lead == runs[0][1].lead)
        tensors[name] = _merge_ranks(ranks, name, (*stack, count, *width))
        check_tiles(name, tensors[name], directory)
        for hf_name, run in runs:
            rows[hf_name].append(run)
    return TiledSource(directory, companions, tensors, rows, shapes, ranks.release)


def _find_files(directory: Path) -> list[Path]:
    """List the files of all ranks, in order. If a rank has a file of extra state, every rank must have one."""
    ranks: defaultdict[str, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in directory.iterdir():
        if match := _NAME.fullmatch(path.name):
            ranks[match.group(1)][int(match.group(2))].add(int(match.group(3)))
    if not ranks["model"]:
        raise ConfigError(
            f"{directory}: no model_world_size_X_rank_Y.pt found; give the directory that contains these files"
        )
    sizes = sorted({size for kind in ranks.values() for size in kind})
    if len(sizes) > 1:
        raise ConfigError(f"{directory}: files of world sizes {sizes} are mixed; keep the files of one save")
    size = sizes[0]
    kinds = [kind for kind in ("model", "extra_state") if ranks[kind]]
    if odd := [(kind, rank) for kind in kinds for rank in ranks[kind][size] if rank >= size]:
        raise ConfigError(
            f"{directory}: {odd[0][0]}_world_size_{size}_rank_{odd[0][1]}.pt: rank {odd[0][1]} is outside world size {size}"
        )
    # Count before listing names, because the world size comes only from a file name.
    if absent := sum(size - len(ranks[kind][size]) for kind in kinds):
        names = (
            f"{kind}_world_size_{size}_rank_{rank}.pt"
            for kind in kinds
            for rank in range(size)
            if rank not in ranks[kind][size]
        )
        raise ConfigError(f"{directory}: {absent} files are missing: {', '.join(islice(names, _NAMED))}")
    return [inside(directory, f"model_world_size_{size}_rank_{rank}.pt", 1) for rank in range(size)]


def _common_names(ranks: _Ranks) -> list[str]:
    names = list(ranks.tensors[0])
    for path, tensors in zip(ranks.files, ranks.tensors, strict=True):
        if differing := set(names) ^ set(tensors):
            raise ConfigError(f"{path}: tensor {min(differing)} is on this rank or on rank 0, but not on both")
    return names


def _rows(name: str, geometry: ModelGeometry, shapes: Mapping[str, Index], where: Path) -> Iterator[tuple[str, Rows]]:
    """Yield the Hugging Face rows in a tensor.

    They are its own rows, or rows that transformers stacks or renames in memory.
    """
    if name in shapes:
        yield name, Rows(0, shapes[name][0], name, (), 0)
        return
    parameter = in_memory(name, geometry)
    try:
        if parameter is None:
            raise KeyError(name)
        stacked = "{k}" in parameter
        for expert in range(geometry.num_experts if stacked else 1):
            for run in row_runs(parameter.format(k=expert), geometry)[0]:
                yield run.hf_name, Rows(run.hf_row, run.count, name, (expert,) if stacked else (), run.row)
    except KeyError as error:
        raise ConfigError(
            f"{where}: tensor {name} does not belong to this model, as config.json describes it"
        ) from error


def _merge_ranks(ranks: _Ranks, name: str, shape: Index) -> Tiled:
    values = [tensors[name] for tensors in ranks.tensors]
    dtypes = {value.local.dtype for value in values}
    if len(dtypes) > 1 or len({value.whole is None for value in values}) > 1:
        raise ConfigError(f"{ranks.directory}: ranks hold {name} in different dtypes or forms")
    dtype = dtypes.pop()
    if values[0].whole is not None:
        return Tiled(dtype, shape, _tiles_of_dtensor(ranks, name, values, shape))
    if all(value.local.shape == shape for value in values):
        _check_same(ranks, name, shape)
        return Tiled(dtype, shape, [_tile(ranks, name, 0, ((0,) * len(shape), shape), (0,) * len(shape))])
    if all(value.local.dim() == 1 for value in values):
        return Tiled(dtype, shape, _tiles_of_flat(ranks, name, [value.local.numel() for value in values], shape))
    raise ConfigError(
        f"{ranks.files[0]}: {name} is a plain tensor of shape {tuple(values[0].local.shape)}, neither whole {shape} nor flat. How it "
        "was cut is not stored; save DTensors (FSDP with a device mesh)."
    )


def _tile(ranks: _Ranks, name: str, rank: int, rectangle: tuple[Index, Index], begin: Index) -> Tile:
    """Return a tile whose values begin at ``begin`` in a rank's part of the tensor."""
    part = ranks.tensors[rank][name].local[Rectangle(begin, rectangle[1]).slices()]
    return Tile(*rectangle, ranks.files[rank].name, part.__getitem__)


def _check_same(ranks: _Ranks, name: str, shape: Index) -> None:
    rows = max(_COMPARED_ELEMENTS // max(prod(shape[1:]), 1), 1)
    own, *others = (tensors[name].local for tensors in ranks.tensors)
    for first in range(0, shape[0], rows):
        part = slice(first, first + rows)
        if any(not torch.equal(own[part], other[part]) for other in others):
            raise ConfigError(f"{ranks.directory}: {name} is whole on every rank, but ranks hold different values")


# ------------------------------------------------------------------------------------------------------------ DTensors
def _tiles_of_dtensor(ranks: _Ranks, name: str, values: Sequence[ForeignTensor], shape: Index) -> list[Tile]:
    mesh, placements = values[0].mesh, values[0].placements
    assert mesh is not None
    if any(v.placements != placements or v.mesh is None or not torch.equal(v.mesh, mesh) for v in values):
        raise ConfigError(f"{ranks.directory}: ranks disagree on the placements or the mesh of {name}")
    if any(value.whole != shape for value in values):
        raise ConfigError(f"{ranks.directory}: {name} has shape {values[0].whole}; config.json requires {shape}")
    if mesh.numel() != len(values) or sorted(mesh.flatten().tolist()) != list(range(len(values))):
        raise ConfigError(f"{ranks.directory}: the mesh of {name} does not hold every rank once")
    tiles = []
    for rank, value in enumerate(values):
        where = tuple(int(k) for k in (mesh == rank).nonzero()[0])
        if any(k for k, placement in zip(where, placements, strict=True) if isinstance(placement, Replicate)):
            continue  # the first replica holds the same values
        axes = _local_intervals(shape, placements, tuple(mesh.shape), where, name)
        local: Index = tuple(sum(length for _, length in axis) for axis in axes)
        if value.local.shape != local and 0 not in local:
            stored = tuple(value.local.shape)
            raise ConfigError(
                f"{ranks.files[rank]}: {name} has local shape {stored}; its placements {list(placements)} give {local}"
            )
        tiles += _tiles_of(ranks, name, rank, axes)
    return tiles


def _tiles_of(ranks: _Ranks, name: str, rank: int, axes: Sequence[Sequence[_Interval]]) -> list[Tile]:
    """List a rank's tiles. There is one tile, unless a strided placement gives the rank several runs of an axis."""
    at = [[(sum(n for _, n in axis[:k]), axis[k][1]) for k in range(len(axis))] for axis in axes]
    return [
        _tile(ranks, name, rank, rectangle, begin)
        for rectangle, (begin, _) in zip(grid_tiles(axes), grid_tiles(at), strict=True)
        if prod(rectangle[1])
    ]


@cache
def _local_intervals(
    shape: Index, placements: tuple[Placement, ...], mesh: Index, where: Index, name: str
) -> tuple[tuple[_Interval, ...], ...]:
    """Return, for every axis, the intervals of the rank at mesh coordinates ``where``, in its local order."""
    axes = [torch.arange(size) for size in shape]
    for placement, size, coordinate in zip(placements, mesh, where, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise ConfigError(f"{name}: placement {placement} is invalid for a tensor of {len(shape)} dimensions")
            axes[dim] = _share(axes[dim], placement, size, coordinate, name)
        elif not isinstance(placement, Replicate):
            raise ConfigError(f"{name}: placement {placement} is not supported; reduce it before saving")
    return tuple(map(_intervals, axes))


def _share(indices: Tensor, placement: Placement, size: int, coordinate: int, name: str) -> Tensor:
    if not isinstance(placement, _StridedShard):
        return _chunk(indices, size, coordinate)
    factor = int(placement.split_factor)
    if len(indices) % (size * factor):
        raise ConfigError(f"{name}: {placement} does not divide {len(indices)} rows evenly, which is not supported")
    return torch.cat([_chunk(part, size, coordinate) for part in indices.chunk(factor)])


def _chunk(indices: Tensor, size: int, coordinate: int) -> Tensor:
    """Return torch.chunk's share. The last shares may be shorter or empty."""
    each = -(-len(indices) // size)
    return indices[coordinate * each : (coordinate + 1) * each]


def _intervals(indices: Tensor) -> tuple[_Interval, ...]:
    """List the maximal runs of consecutive indices."""
    if len(indices) == 0:
        return ((0, 0),)
    ends = [*((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return tuple((int(indices[begin]), end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


# ---------------------------------------------------------------------------------------------------------- flat shards
def _tiles_of_flat(ranks: _Ranks, name: str, lengths: Sequence[int], shape: Index) -> list[Tile]:
    """Cut flat shards into tiles.

    Ranks hold consecutive intervals of the flattened tensor. Equal shards may end with padding.
    """
    surplus = sum(lengths) - prod(shape)
    if surplus < 0 or (surplus and (len(set(lengths)) > 1 or surplus >= len(lengths))):
        raise ConfigError(
            f"{ranks.directory}: the flat shards of {name} have {lengths} elements; shape {shape} requires {prod(shape)}"
        )
    if len(shape) > 2:
        raise ConfigError(
            f"{ranks.directory}: flat shards of {name}, of shape {shape}, are not supported; save DTensors"
        )
    tiles: list[Tile] = []
    begin = 0
    for rank, length in enumerate(lengths):
        end = min(begin + length, prod(shape))
        for first, start, extent in _rectangles(begin, end, shape):
            tiles.append(_flat_tile(ranks, name, rank, (start, extent), first - begin))
        begin = end
    return tiles


def _rectangles(begin: int, end: int, shape: Index) -> Iterator[tuple[int, Index, Index]]:
    """Cut an interval of a flat tensor into the rest of a row, whole rows, and the start of a row.

    Yield first element, start and shape.
    """
    if len(shape) == 1:
        if begin < end:
            yield begin, (begin,), (end - begin,)
        return
    width = shape[1]
    while begin < end:
        row, column = divmod(begin, width)
        rows = 1 if column else max((end - begin) // width, 1)
        columns = min(width - column, end - begin)
        yield begin, (row, column), (rows, columns)
        begin += rows * columns


def _flat_tile(ranks: _Ranks, name: str, rank: int, rectangle: tuple[Index, Index], first: int) -> Tile:
    """Return a tile whose rows are consecutive in a rank's part, from element ``first``."""
    part = ranks.tensors[rank][name].local[first : first + prod(rectangle[1])].view(rectangle[1])
    return Tile(*rectangle, ranks.files[rank].name, part.__getitem__)
