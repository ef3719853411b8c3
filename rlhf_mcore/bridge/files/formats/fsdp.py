"""Sharded PyTorch checkpoints as other trainers write them: ``model_world_size_X_rank_Y.pt``, merged by placement.

A tensor is a DTensor, whose placements give the rectangle that a rank holds; or flat, a rank's interval of the flattened tensor;
or whole on every rank. Anything else is refused: a dimension is never guessed.
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

from rlhf_mcore.bridge.files.formats.checks import BUFFERS
from rlhf_mcore.bridge.files.formats.located import Located, locate, read
from rlhf_mcore.bridge.files.formats.tiles import Index, Rows, Tile, Tiled, TiledSource, check_tiles, grid_tiles
from rlhf_mcore.bridge.files.hf_files import inside
from rlhf_mcore.bridge.map.rules import hf_shapes, in_memory, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import ModelGeometry

COMPANIONS = "huggingface"  # where such checkpoints keep config.json and the tokenizer
_NAME = re.compile(r"(model|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt", re.ASCII)
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
_COMPARED_ELEMENTS = 2**21
_NAMED = 5  # missing files in a message
_Interval = tuple[int, int]  # start, length


class _Ranks:
    """What the files of all ranks hold."""

    def __init__(self, directory: Path, *, check: bool):
        self.directory = directory
        self.files = _find_files(directory)
        self.held = [
            {_WRAPPERS.sub("", name): tensor for name, tensor in locate(path, check=check).items()}
            for path in self.files
        ]

    def read(self, rank: int, name: str, inside: tuple[slice, ...]) -> Tensor:
        """A rectangle of what a rank holds of a tensor."""
        return read(self.files[rank], self.held[rank][name], inside)


def open_fsdp(directory: Path, companions: Path, geometry: ModelGeometry, *, check: bool = True) -> TiledSource:
    """A sharded checkpoint as Hugging Face tensors. With ``check``, the checksums of all files are compared.

    Raises:
        ConfigError: a rank's file is absent or unsafe, ranks disagree, or parts do not make whole tensors.
    """
    ranks = _Ranks(directory, check=check)
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
    return TiledSource(directory, companions, tensors, rows, shapes)


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
    kinds = [kind for kind in ("model", "extra_state") if found[kind]]
    if odd := [(kind, rank) for kind in kinds for rank in found[kind][size] if rank >= size]:
        raise ConfigError(f"{directory}: {odd[0][0]}_world_size_{size}_rank_{odd[0][1]}.pt is of no rank of {size}")
    # Counted before they are named: the size is only what a file name claims.
    if absent := sum(size - len(found[kind][size]) for kind in kinds):
        names = (
            f"{kind}_world_size_{size}_rank_{rank}.pt"
            for kind in kinds
            for rank in range(size)
            if rank not in found[kind][size]
        )
        raise ConfigError(f"{directory}: {absent} files are missing: {', '.join(islice(names, _NAMED))}")
    return [inside(directory, f"model_world_size_{size}_rank_{rank}.pt", 1) for rank in range(size)]


def _common_names(ranks: _Ranks) -> list[str]:
    names = list(ranks.held[0])
    for path, held in zip(ranks.files, ranks.held, strict=True):
        if differing := set(names) ^ set(held):
            raise ConfigError(f"{path}: tensor {min(differing)} is on this rank or on rank 0, but not on both")
    return names


def _rows(name: str, geometry: ModelGeometry, shapes: Mapping[str, Index], where: Path) -> Iterator[tuple[str, Rows]]:
    """The Hugging Face rows in a tensor: all of its own, or those that transformers stacks or renames in memory."""
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


def _tiled(ranks: _Ranks, name: str, shape: Index) -> Tiled:
    values = [held[name] for held in ranks.held]
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1 or len({value.whole is None for value in values}) > 1:
        raise ConfigError(f"{ranks.directory}: ranks hold {name} in different dtypes or forms")
    dtype = dtypes.pop()
    if values[0].whole is not None:
        return Tiled(dtype, shape, _placed(ranks, name, values, shape))
    if all(value.shape == shape for value in values):
        _check_same(ranks, name, shape)
        return Tiled(dtype, shape, [_tile(ranks, name, 0, ((0,) * len(shape), shape), (0,) * len(shape))])
    if all(len(value.shape) == 1 for value in values):
        return Tiled(dtype, shape, _flat(ranks, name, [value.numel for value in values], shape))
    raise ConfigError(
        f"{ranks.files[0]}: {name} is a plain tensor of shape {values[0].shape}, neither whole {shape} nor flat. How it "
        "was cut is not stored; save DTensors (FSDP with a device mesh)."
    )


def _tile(ranks: _Ranks, name: str, rank: int, rectangle: tuple[Index, Index], begin: Index) -> Tile:
    """The tile of a tensor that starts at ``begin`` of what a rank holds."""

    def load(inside: tuple[slice, ...]) -> Tensor:
        return ranks.read(rank, name, tuple(slice(s.start + b, s.stop + b) for s, b in zip(inside, begin, strict=True)))

    return Tile(*rectangle, ranks.files[rank].name, load)


def _check_same(ranks: _Ranks, name: str, shape: Index) -> None:
    rows = max(_COMPARED_ELEMENTS // max(prod(shape[1:]), 1), 1)
    rest = tuple(slice(0, size) for size in shape[1:])
    for first in range(0, shape[0], rows):
        inside = (slice(first, min(first + rows, shape[0])), *rest)
        expected = ranks.read(0, name, inside)
        if any(not torch.equal(expected, ranks.read(rank, name, inside)) for rank in range(1, len(ranks.files))):
            raise ConfigError(f"{ranks.directory}: {name} is whole on every rank, but ranks hold different values")


# ------------------------------------------------------------------------------------------------------------ DTensors
def _placed(ranks: _Ranks, name: str, values: Sequence[Located], shape: Index) -> list[Tile]:
    mesh, placements = values[0].mesh, values[0].placements
    assert mesh is not None
    if any(v.placements != placements or v.mesh is None or not torch.equal(v.mesh, mesh) for v in values):
        raise ConfigError(f"{ranks.directory}: ranks disagree on the placements or the mesh of {name}")
    if any(value.whole != shape for value in values):
        raise ConfigError(f"{ranks.directory}: {name} has shape {values[0].whole}; config.json asks for {shape}")
    if sorted(mesh.flatten().tolist()) != list(range(len(values))):
        raise ConfigError(f"{ranks.directory}: the mesh of {name} does not hold every rank once")
    tiles = []
    for rank, value in enumerate(values):
        where = tuple(int(k) for k in (mesh == rank).nonzero()[0])
        if any(k for k, placement in zip(where, placements, strict=True) if isinstance(placement, Replicate)):
            continue  # others hold what the first replica does
        held = _held(shape, placements, tuple(mesh.shape), where, name)
        local: Index = tuple(sum(length for _, length in axis) for axis in held)
        if value.shape != local and 0 not in local:
            raise ConfigError(
                f"{ranks.files[rank]}: {name} has local shape {value.shape}; its placements {list(placements)} give {local}"
            )
        tiles += _tiles_of(ranks, name, rank, held)
    return tiles


def _tiles_of(ranks: _Ranks, name: str, rank: int, held: Sequence[Sequence[_Interval]]) -> list[Tile]:
    """A rank's rectangles: one, unless a strided placement left it several runs of an axis."""
    at = [[(sum(n for _, n in axis[:k]), axis[k][1]) for k in range(len(axis))] for axis in held]
    return [
        _tile(ranks, name, rank, rectangle, begin)
        for rectangle, (begin, _) in zip(grid_tiles(held), grid_tiles(at), strict=True)
        if prod(rectangle[1])
    ]


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
def _flat(ranks: _Ranks, name: str, lengths: Sequence[int], shape: Index) -> list[Tile]:
    """Ranks hold consecutive intervals of the flattened tensor; equal ones may end with padding."""
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
            tiles.append(_flat_tile(ranks, name, rank, (start, extent), first - begin))
        begin = end
    return tiles


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


def _flat_tile(ranks: _Ranks, name: str, rank: int, rectangle: tuple[Index, Index], first: int) -> Tile:
    """A tile whose rows are back to back in what a rank holds, from element ``first`` on."""
    width = prod(rectangle[1][1:])

    def load(inside: tuple[slice, ...]) -> Tensor:
        rows = inside[0]
        flat = ranks.read(rank, name, (slice(first + rows.start * width, first + rows.stop * width),))
        return flat.view(-1, *rectangle[1][1:])[(slice(None), *inside[1:])]

    return Tile(*rectangle, ranks.files[rank].name, load)
