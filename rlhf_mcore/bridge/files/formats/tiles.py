"""Represent tensors of foreign formats: a full shape, and stored rectangles in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.tensor_files import TensorTypes
from rlhf_mcore.bridge.map.coverage import CoverageError, padding_of
from rlhf_mcore.bridge.map.pieces import Index, Piece, Place, Rectangle, contiguous_strides, whole
from rlhf_mcore.bridge.map.rules import find_rule, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of a tensor. ``load`` reads a rectangle inside it. ``file`` names its file."""

    start: Index
    shape: Index
    file: str
    load: Callable[[tuple[slice, ...]], Tensor]

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.start, self.shape)


# Some files stack experts in one tensor, with columns for outputs. Megatron's formats store each expert alone,
# with rows for outputs.
@dataclass(frozen=True, slots=True)
class ExpertForm:
    """How Megatron's formats store one expert's part.

    ``by_halves``: all rows of the gate come first, then all rows of the up projection. Hugging Face files
    alternate them.
    """

    shape: tuple[int, ...]  # [outputs, inputs], or [outputs] for a bias
    by_halves: bool

    def to_megatron(self, stored: Tensor) -> Tensor:
        """Convert [1, inputs, outputs] or [1, outputs] to Megatron's rows of outputs."""
        rows = stored[0].T if stored.dim() == 3 else stored[0]
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.by_halves else rows

    def to_hf(self, rows_of_outputs: Tensor) -> Tensor:
        """Convert the result of :meth:`to_megatron` back to [inputs, outputs] or [outputs]."""
        rows = (
            rows_of_outputs.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self.by_halves else rows_of_outputs
        )
        return rows.T if rows_of_outputs.dim() == 2 else rows


def expert_form(parameter: str, geometry: ModelGeometry) -> ExpertForm | None:
    """Return the form of a parameter whose rows are not rows of Hugging Face tensors.

    Return None for other parameters.
    """
    if find_rule(geometry, parameter)[0].kind != "stacked":
        return None
    return ExpertForm(row_runs(parameter, geometry)[1], ".linear_fc1." in parameter)


@dataclass(slots=True)
class Tiled:
    """A tensor in tiles, which are disjoint and cover it (``check_tiles``)."""

    dtype: torch.dtype
    shape: Index
    tiles: Sequence[Tile]
    _at: dict[Index, list[Tile]] = field(default_factory=dict)

    def read_into(self, out: Tensor, lead: Index, start: Index) -> None:
        """Fill a contiguous tensor with the rectangle of ``tensor[lead]`` that begins at ``start``."""
        target = Rectangle((*lead, *start), (*(1 for _ in lead), *out.shape))
        out = out.view(target.shape)
        for tile in self._near(lead):
            shared = target.intersection(tile.rectangle)
            if shared is not None:
                out[shared.slices(target.start)] = tile.load(shared.slices(tile.start))

    def _near(self, lead: Index) -> Sequence[Tile]:
        """List the tiles that intersect ``tensor[lead]``. A stack of layers and experts has thousands of tiles."""
        if not lead:
            return self.tiles
        if not self._at:
            for tile in self.tiles:
                axes = (range(tile.start[k], tile.start[k] + tile.shape[k]) for k in range(len(lead)))
                for index in product(*axes):
                    self._at.setdefault(index, []).append(tile)
        return self._at[lead]


def check_tiles(name: str, tensor: Tiled, where: Path) -> None:
    """Check that every element is in exactly one tile.

    Raises:
        ConfigError: the tiles overlap, leave a gap, or reach outside the tensor.
    """
    if _is_grid(tensor):
        return
    covered, total = sum(prod(tile.shape) for tile in tensor.tiles), prod(tensor.shape)
    if not all(whole(tensor.shape).contains(tile.rectangle) for tile in tensor.tiles):
        raise ConfigError(f"{where}: a part of {name} reaches outside of it. It is damaged.")
    if covered < total:
        raise ConfigError(f"{where}: {total - covered} of the {total} elements of {name} are in no file.")
    strides = contiguous_strides(tensor.shape)
    pieces = tuple(
        Piece(name, tile.start, tile.shape, sum(map(int.__mul__, tile.start, strides)), strides)
        for tile in tensor.tiles
    )
    try:
        gaps = padding_of(Place(name, pieces, (0,), total)) if covered == total else ()
    except CoverageError:
        covered = total + 1
    if covered > total or gaps:
        raise ConfigError(f"{where}: parts of {name} overlap. It is damaged.")


def _is_grid(tensor: Tiled) -> bool:
    """Return whether the tiles are the cells of a grid over the tensor, each exactly once."""
    if not tensor.shape:
        return [tile.shape for tile in tensor.tiles] == [()]
    if any(len(tile.start) != len(tensor.shape) for tile in tensor.tiles):
        return False
    spans = [
        {(tile.start[axis], tile.start[axis] + tile.shape[axis]) for tile in tensor.tiles}
        for axis in range(len(tensor.shape))
    ]
    for size, axis in zip(tensor.shape, spans, strict=True):
        ordered = sorted(axis)
        borders = [0, *(end for _, end in ordered)]
        if borders[-1] != size or [begin for begin, _ in ordered] != borders[:-1]:
            return False
    starts = {tile.start for tile in tensor.tiles}
    return len(starts) == len(tensor.tiles) == prod(map(len, spans))


@dataclass(frozen=True, slots=True)
class Rows:
    """Map rows ``hf_row`` to ``hf_row + count`` of a Hugging Face tensor to rows of ``key[lead]``, from ``row``.

    With a ``form``, the run is one row that contains all of ``key[lead]``.
    """

    hf_row: int
    count: int
    key: str
    lead: Index
    row: int
    form: ExpertForm | None = None


class TiledSource:
    """Read tiled tensors as Hugging Face tensors, through a map of rows.

    Args:
        tensors: tiled tensors by the format's names.
        rows: for every Hugging Face tensor, the places of its rows, in order.
        shapes: shapes of the Hugging Face tensors.
        release: frees the memory of earlier reads.
    """

    def __init__(
        self,
        directory: Path,
        companions: Path,
        tensors: Mapping[str, Tiled],
        rows: Mapping[str, Sequence[Rows]],
        shapes: Mapping[str, Index],
        release: Callable[[], None] = lambda: None,
    ):
        self.directory, self.companions = directory, companions
        self._tensors, self._rows, self._shapes = tensors, rows, shapes
        self.release = release

    @cached_property
    def types(self) -> TensorTypes:
        """Dtype and shape of every Hugging Face tensor."""
        return {name: (self._tensors[rows[0].key].dtype, self._shapes[name]) for name, rows in self._rows.items()}

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of a tensor, contiguous."""
        dtype, shape = self.types[name]
        out = torch.empty((count, *shape[1:]), dtype=dtype)
        for run in self._rows[name]:
            low, high = max(first, run.hf_row), min(first + count, run.hf_row + run.count)
            if low < high and run.form is not None:
                parameter = torch.empty(run.form.shape, dtype=dtype)
                self._tensors[run.key].read_into(parameter, run.lead, (0,) * parameter.dim())
                out[low - first] = run.form.to_hf(parameter)
            elif low < high:
                start = (run.row + low - run.hf_row, *(0 for _ in shape[1:]))
                self._tensors[run.key].read_into(out[low - first : high - first], run.lead, start)
        return out

    def origin(self, name: str) -> str:
        """Return the tensor's parts in the format's names, with stack indices if parts are stacked."""
        keys = dict.fromkeys((run.key, run.lead) for run in self._rows[name])
        return ", ".join(key + "".join(f"[{k}]" for k in lead) for key, lead in keys)


def grid_tiles(parts: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Index, Index]]:
    """Return start and shape of the rectangles that intervals (start, length) along each axis span."""
    return [(tuple(b for b, _ in cell), tuple(n for _, n in cell)) for cell in product(*parts)]
