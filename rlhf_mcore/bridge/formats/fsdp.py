"""Sharded PyTorch checkpoints as other trainers write them: ``model_world_size_X_rank_Y.pt``, merged by placement.

A tensor is a DTensor, whose placements say which rectangle a rank holds; or flat, a rank's interval of the flattened tensor;
or whole on every rank. Anything else is refused: a dimension is never guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlhf_mcore.bridge.formats.checks import BUFFERS, inside
from rlhf_mcore.bridge.formats.foreign_pickle import load_tensors
from rlhf_mcore.bridge.formats.megatron_rows import runs
from rlhf_mcore.bridge.formats.tiles import Index, Rows, Tile, Tiled, TiledSource, check_tiles, grid_tiles
from rlhf_mcore.bridge.rules import hf_shapes, in_memory
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.types import ModelGeometry

COMPANIONS = "huggingface"  # where such checkpoints keep config.json and the tokenizer
_NAME = re.compile(r"(model|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
_COMPARED_BYTES = 32 * 2**20
_Interval = tuple[int, int]  # start, length


class _Ranks:
    """The files of all ranks. They are mapped, and mapped anew after ``release``, so that no page stays in memory for ever."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = _find_files(directory)
        self._open: dict[int, dict[str, Any]] = {}

    def __getitem__(self, rank: int) -> dict[str, Any]:
        if rank not in self._open:
            found = load_tensors(self.files[rank])
            self._open[rank] = {_WRAPPERS.sub("", str(name)): value for name, value in found.items()}
        return self._open[rank]

    def local(self, rank: int, name: str) -> Tensor:
        """What a rank holds of a tensor."""
        value = self[rank][name]
        return value._local_tensor if isinstance(value, DTensor) else value

    def release(self) -> None:
        """Unmap all files."""
        self._open.clear()


def open_fsdp(directory: Path, companions: Path, geometry: ModelGeometry) -> TiledSource:
    """A sharded checkpoint as Hugging Face tensors.

    Raises:
        ConfigError: a rank's file is absent or unsafe, ranks disagree, or parts do not make whole tensors.
    """
    ranks = _Ranks(directory)
    shapes = hf_shapes(geometry)
    if geometry.tied_embeddings:  # modules hold the matrix under both names
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    tensors: dict[str, Tiled] = {}
    rows: defaultdict[str, list[Rows]] = defaultdict(list)
    for name in _common_names(ranks):
        if name.endswith(BUFFERS):
            continue
        found = list(_rows(name, geometry, shapes, directory))
        stack = (geometry.num_experts,) if found[0][1].lead else ()
        width = shapes[found[0][0]][1:]
        count = sum(run.count for _, run in found if run.lead == found[0][1].lead)
        tensors[name] = _tiled(ranks, name, (*stack, count, *width))
        check_tiles(name, tensors[name], directory)
        for hf_name, run in found:
            rows[hf_name].append(run)
    ranks.release()
    return TiledSource(directory, companions, tensors, rows, shapes, ranks.release)


def _find_files(directory: Path) -> list[Path]:
    """The files of all ranks, in order; the extra state of each must be there too if that of any is."""
    found: defaultdict[str, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in directory.iterdir():
        if match := _NAME.fullmatch(path.name):
            found[match.group(1)][int(match.group(2))].add(int(match.group(3)))
    if not found["model"]:
        raise ConfigError(f"{directory}: no model_world_size_X_rank_Y.pt is here; give the directory that holds them")
    sizes = sorted({size for kind in found.values() for size in kind})
    if len(sizes) > 1:
        raise ConfigError(f"{directory}: files of world sizes {sizes} are mixed; keep those of one save")
    size = sizes[0]
    missing = [
        f"{kind}_world_size_{size}_rank_{rank}.pt"
        for kind in ("model", "extra_state")
        if found[kind]
        for rank in range(size)
        if rank not in found[kind][size]
    ]
    if missing:
        raise ConfigError(f"{directory}: {len(missing)} files are missing: {', '.join(missing[:5])}")
    return [inside(directory, f"model_world_size_{size}_rank_{rank}.pt", 1) for rank in range(size)]


def _common_names(ranks: _Ranks) -> list[str]:
    names = list(ranks[0])
    for rank in range(1, len(ranks.files)):
        if differing := set(names) ^ set(ranks[rank]):
            raise ConfigError(
                f"{ranks.files[rank]}: tensor {min(differing)} is on this rank or on rank 0, but not on both"
            )
    wrong = [name for name in names if not isinstance(ranks[0][name], Tensor)]
    if wrong:
        raise ConfigError(f"{ranks.files[0]}: {wrong[0]} is no tensor")
    return names


def _rows(name: str, geometry: ModelGeometry, shapes: Mapping[str, Index], where: Path) -> Iterator[tuple[str, Rows]]:
    """The Hugging Face rows in a tensor: all of its own, or those that transformers stacks or renames in memory."""
    if name in shapes:
        yield name, Rows(0, shapes[name][0], name, (), 0)
        return
    parameter = in_memory(name)
    try:
        if parameter is None:
            raise KeyError(name)
        stacked = "{k}" in parameter
        for expert in range(geometry.num_experts if stacked else 1):
            for run in runs(parameter.format(k=expert), geometry)[0]:
                yield run.hf_name, Rows(run.hf_row, run.count, name, (expert,) if stacked else (), run.row)
    except KeyError as error:
        raise ConfigError(
            f"{where}: tensor {name} does not belong to this model, as config.json describes it"
        ) from error


def _tiled(ranks: _Ranks, name: str, shape: Index) -> Tiled:
    values = [ranks[rank][name] for rank in range(len(ranks.files))]
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1 or len({isinstance(value, DTensor) for value in values}) > 1:
        raise ConfigError(f"{ranks.directory}: ranks hold {name} in different dtypes or forms")
    if isinstance(values[0], DTensor):
        return Tiled(dtypes.pop(), shape, _placed(ranks, name, values, shape))
    if all(tuple(value.shape) == shape for value in values):
        if any(not torch.equal(values[0], value) for value in values[1:]):
            raise ConfigError(f"{ranks.directory}: {name} is whole on every rank, but ranks hold different values")
        if len(values) * values[0].nbytes > _COMPARED_BYTES:
            ranks.release()  # comparing has read it all
        return Tiled(dtypes.pop(), shape, [_tile(ranks, name, 0, (0,) * len(shape), shape)])
    if all(value.dim() == 1 for value in values):
        return _flat(ranks, name, values, shape)
    raise ConfigError(
        f"{ranks.files[0]}: {name} is a plain tensor of shape {tuple(values[0].shape)}, neither whole {shape} nor flat. Nothing "
        "says how it was cut; save DTensors (FSDP with a device mesh)."
    )


def _tile(ranks: _Ranks, name: str, rank: int, start: Index, shape: Index) -> Tile:
    return Tile(start, shape, ranks.files[rank].name, lambda: ranks.local(rank, name))


# ------------------------------------------------------------------------------------------------------------ DTensors
def _placed(ranks: _Ranks, name: str, values: Sequence[DTensor], shape: Index) -> list[Tile]:
    mesh = values[0].device_mesh.mesh
    placements = tuple(values[0].placements)
    if any(tuple(v.placements) != placements or not torch.equal(v.device_mesh.mesh, mesh) for v in values):
        raise ConfigError(f"{ranks.directory}: ranks disagree on the placements or the mesh of {name}")
    if any(tuple(value.shape) != shape for value in values):
        raise ConfigError(f"{ranks.directory}: {name} has shape {tuple(values[0].shape)}; config.json asks for {shape}")
    if sorted(mesh.flatten().tolist()) != list(range(len(values))):
        raise ConfigError(f"{ranks.directory}: the mesh of {name} does not hold every rank once")
    tiles = []
    for rank in range(len(values)):
        where = tuple(int(k) for k in (mesh == rank).nonzero()[0])
        if any(k for k, placement in zip(where, placements, strict=True) if isinstance(placement, Replicate)):
            continue  # the first replica speaks for the others
        held: Sequence[Sequence[_Interval]] = _held(shape, placements, tuple(mesh.shape), where, name)
        local: Index = tuple(sum(length for _, length in axis) for axis in held)
        if tuple(values[rank]._local_tensor.shape) != local and 0 not in local:
            raise ConfigError(
                f"{ranks.files[rank]}: {name} has local shape {tuple(values[rank]._local_tensor.shape)}; "
                f"its placements {list(placements)} give {local}"
            )
        tiles += _tiles_of(ranks, name, rank, held)
    return tiles


def _tiles_of(ranks: _Ranks, name: str, rank: int, held: Sequence[Sequence[_Interval]]) -> list[Tile]:
    """A rank's rectangles: one, unless a strided placement left it several runs of an axis."""
    at = [[(sum(n for _, n in axis[:k]), axis[k][1]) for k in range(len(axis))] for axis in held]
    tiles = []
    for (start, shape), (begin, _) in zip(grid_tiles(held), grid_tiles(at), strict=True):
        if prod(shape):
            tiles.append(Tile(start, shape, ranks.files[rank].name, partial(_part, ranks, name, rank, begin, shape)))
    return tiles


def _part(ranks: _Ranks, name: str, rank: int, begin: Index, shape: Index) -> Tensor:
    return ranks.local(rank, name)[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]


@cache
def _held(
    shape: Index, placements: tuple[Placement, ...], mesh: Index, where: Index, name: str
) -> tuple[tuple[_Interval, ...], ...]:
    """What the rank at ``where`` of the mesh holds of every axis, in its local order."""
    axes = [torch.arange(size) for size in shape]
    for placement, size, coordinate in zip(placements, mesh, where, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise ConfigError(f"{name}: placement {placement} of a tensor of {len(shape)} dimensions")
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
    """torch.chunk's share: the last ones are shorter, or empty."""
    each = -(-len(indices) // size)
    return indices[coordinate * each : (coordinate + 1) * each]


def _intervals(indices: Tensor) -> tuple[_Interval, ...]:
    """Maximal runs of consecutive indices."""
    if len(indices) == 0:
        return ((0, 0),)
    ends = [*((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return tuple((int(indices[begin]), end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


# ---------------------------------------------------------------------------------------------------------- flat shards
def _flat(ranks: _Ranks, name: str, values: Sequence[Tensor], shape: Index) -> Tiled:
    """Ranks hold consecutive intervals of the flattened tensor; equal ones may end with padding."""
    lengths = [value.numel() for value in values]
    surplus = sum(lengths) - prod(shape)
    if surplus < 0 or (surplus and (len(set(lengths)) > 1 or surplus >= len(lengths))):
        raise ConfigError(
            f"{ranks.directory}: the flat shards of {name} have {lengths} elements; {prod(shape)} of shape {shape} are asked for"
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
            tiles.append(_flat_tile(ranks, name, rank, first - begin, start, extent))
        begin = end
    return Tiled(values[0].dtype, shape, tiles)


def _rectangles(begin: int, end: int, shape: Index) -> Iterator[tuple[int, Index, Index]]:
    """An interval of a flat tensor: the rest of a row, whole rows, the beginning of a row. First element, start, shape."""
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


def _flat_tile(ranks: _Ranks, name: str, rank: int, first: int, start: Index, shape: Index) -> Tile:
    end = first + prod(shape)
    return Tile(start, shape, ranks.files[rank].name, lambda: ranks.local(rank, name)[first:end].view(shape))
