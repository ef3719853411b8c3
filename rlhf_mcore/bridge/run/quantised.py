"""Quantise sent weights to 8 bits, or round them to the values of 8 bits for engines with a larger dtype.

fp8: blocks of 128x128 with a scale each, as DeepSeek-V3 is stored (DeepSeek-AI 2024, arXiv 2412.19437, section
3.3) and as vLLM's ``per_block_cast_to_fp8`` computes it. int8: rows with a scale each, as compressed-tensors
computes it (strategy "channel", symmetric). Products, quotients and roundings follow these two sources operation
by operation, so results are equal bit for bit.

If the trainer itself computes in fp8 (``actor.fp8``), weights are quantised like Transformer Engine's blocks.
Values are multiplied by 448 / amax and rounded once. The scale is the reciprocal of that factor
(Float8BlockQuantizer with fp32 scales, in releases 2.3 to 2.17).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece, Place, Rectangle, view
from rlhf_mcore.bridge.map.quantised import SCALES, QuantisedNames, are_quantised, scale_tables
from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import BuiltSources, KeptSources, Sources
from rlhf_mcore.families.quantised import Quantisation
from rlhf_mcore.geometry import LocalParameter

ELEMENTS = 1 << 24  # per chunk of a weight: 64 MiB in fp32
_FP8_MAX, _LEAST_AMAX = 448.0, 1e-4
_INT8_STEPS = 127.5  # half of the range from -128 to 127


def scales_of(amax: Tensor, kind: Quantisation) -> Tensor:
    """Return the scales of blocks from the largest magnitude in each block, fp32 of any shape."""
    if kind.of_training:
        return 1.0 / _factors(amax, kind)
    if kind.name == "fp8":
        return amax.clamp(_LEAST_AMAX) / _FP8_MAX
    scales = amax / _INT8_STEPS
    return torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)


def _factors(amax: Tensor, kind: Quantisation) -> Tensor:
    """Return the factors that convert values to fp8, from the largest magnitude in each block."""
    if not kind.of_training:
        return 1.0 / scales_of(amax, kind)
    # torch computes number / tensor as a product with the reciprocal, which rounds twice. ``full_like`` avoids this.
    factors = (torch.full_like(amax, _FP8_MAX) / amax).clamp(max=torch.finfo(torch.bfloat16).max)
    return torch.where(amax > 0, factors, 1.0)  # a block of zeros


@torch.no_grad()
def largest_magnitudes(part: Tensor, start: Sequence[int], kind: Quantisation) -> Tensor:
    """Return the largest magnitude in each block that a rectangle [n, m] of a tensor intersects: fp32 [blocks, blocks].

    The rectangle starts at ``start`` in the tensor. In blocks at its borders, only elements inside the rectangle
    count.
    """
    first, shape = kind.blocks(tuple(start), tuple(part.shape))
    largest = part.new_zeros(shape, dtype=torch.float32)
    for rows, chunk in _chunks(part, kind.block[0]):
        grouped = _view_as_blocks(chunk, (start[0] + rows, start[1]), kind)
        low = (start[0] + rows) // kind.block[0] - first[0]
        table = largest[low : low + grouped.shape[0]]
        torch.maximum(table, grouped.abs().amax(dim=(1, 3)).float(), out=table)
    return largest


def _view_as_blocks(part: Tensor, start: Sequence[int], kind: Quantisation) -> Tensor:
    """View a rectangle as [blocks, rows per block, blocks, columns per block]. Pad partial blocks with zeros."""
    padding, shape = list[int](), list[int]()
    for begin, count, size in zip(start, part.shape, kind.block, strict=True):
        first = begin % size
        before, after = (0, 0) if first + count <= size else (first, -(first + count) % size)
        padding = [before, after, *padding]  # last axis first
        shape += [1, count] if first + count <= size else [(before + count + after) // size, size]
    if any(padding):
        part = torch.nn.functional.pad(part, padding)
    return part.reshape(shape)


@torch.no_grad()
def quantise(part: Tensor, start: Sequence[int], amax: Tensor, kind: Quantisation, out: Tensor) -> None:
    """Quantise a rectangle [n, m], which starts at ``start`` in its tensor, and write it into ``out``.

    ``amax`` contains the largest magnitudes in the blocks that the rectangle intersects.
    """
    is_fp8 = kind.name == "fp8"
    factors = _factors(amax, kind) if is_fp8 else scales_of(amax, kind)
    for rows, chunk in _chunks(part, 1):
        of_rows = _spread(factors, (start[0] + rows, start[1]), chunk.shape, start, kind)
        values = chunk.float() * of_rows if is_fp8 else (chunk.float() / of_rows).clamp(-128, 127).round()
        out[rows : rows + len(chunk)] = values.to(out.dtype)


@torch.no_grad()
def dequantise(eight: Tensor, start: Sequence[int], scales: Tensor, kind: Quantisation, out: Tensor) -> None:
    """Dequantise 8-bit values [n, m], which start at ``start`` in their tensor, into ``out``: products in fp32, rounded once."""
    for rows, chunk in _chunks(eight, 1):
        factors = _spread(scales, (start[0] + rows, start[1]), chunk.shape, start, kind)
        out[rows : rows + len(chunk)] = chunk.float() * factors


def _spread(
    scales: Tensor, begin: Sequence[int], shape: Sequence[int], start: Sequence[int], kind: Quantisation
) -> Tensor:
    """Repeat scales for the elements of a rectangle's rows: [n, m], or [n, 1] if each row has one scale."""
    for axis, (low, count, first, size) in enumerate(zip(begin, shape, start, kind.block, strict=True)):
        if axis == 0 or scales.shape[1] > 1:
            place = torch.arange(low, low + count, device=scales.device) // size - first // size
            scales = scales.index_select(axis, place)
    return scales


def _chunks(part: Tensor, multiple: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a rectangle into chunks of rows to convert at once. Yield the first row's number, and the rows."""
    count = max(ELEMENTS // max(part.shape[1], 1) // multiple, 1) * multiple
    for first in range(0, part.shape[0], count):
        yield first, part[first : first + count]


class _ReadBucket(Bucket):
    """A bucket that reads some buffers, for reading sources outside a plan."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(-1)
        self._names = names

    @property
    def source_buffers(self) -> set[str]:
        return self._names


class QuantisedSources(BuiltSources):
    """Other sources quantised to 8 bits, and their scales. Or the dequantised values, in the sources' dtype.

    If several ranks hold parts of a block, the block's scale covers all parts. A sync starts with an all-reduce of
    their largest magnitudes.

    Args:
        sources: the weights.
        parameters: this rank's parameters, as in ``sources``.
        names: names and pieces of the sent tensors.
        places: source places of all ranks.
        group: the ranks of a sync.
        kept: copies of the values sent last, if there are any.
        dequantises: return dequantised values, for engines that do not store 8 bits.
    """

    def __init__(
        self,
        sources: Sources,
        parameters: Sequence[LocalParameter],
        names: QuantisedNames,
        places: Sequence[Place],
        group: dist.ProcessGroup,
        kept: KeptSources | None = None,
        *,
        dequantises: bool = False,
    ) -> None:
        super().__init__()
        self._sources, self._kind, self._group, self._dequantises = sources, names.kind, group, dequantises
        self.device = sources.device
        of_rank = {parameter.name: names.pieces(parameter) for parameter in parameters}
        self._pieces = {name: pieces for name, pieces in of_rank.items() if are_quantised(pieces, names.kind)}
        self._cut: dict[str, tuple[int, tuple[int, ...]]] = {}  # tensors with blocks on several ranks: offset and shape
        self._cut_numel, shapes = 0, names.shapes()
        for name in names.find_split_tensors(places):
            shape = shapes[name + self._kind.suffix]
            self._cut[name] = self._cut_numel, shape
            self._cut_numel += prod(shape)
        self._amax: Mapping[str, Tensor] = {}  # the largest magnitudes in blocks, flat, by buffer
        self.kept: QuantisedSources | None = None
        if kept is not None:
            self.kept = QuantisedSources(kept, parameters, names, places, group, dequantises=dequantises)

    def take(self) -> None:
        assert isinstance(self._sources, KeptSources)
        self._sources.take()

    def prepare(self) -> None:
        """Compute the magnitudes that determine the scales. This is a collective call over the group."""
        self._sources.prepare()
        if self.kept is not None:
            self.kept._amax = self._amax
        shared = torch.zeros(self._cut_numel, device=self.device)
        largest = {name: self._largest(name) for name in self._pieces}
        for piece, table in self._cut_tables(largest):
            of_all = self._of_whole(shared, piece)
            torch.maximum(of_all, table, out=of_all)
        if self._cut_numel:
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        for piece, table in self._cut_tables(largest):
            table.copy_(self._of_whole(shared, piece))
        self._amax = {name: torch.cat([table.view(-1) for table in tables]) for name, tables in largest.items()}

    def _largest(self, name: str) -> list[Tensor]:
        """Return the largest magnitudes in the blocks of each piece of a buffer."""
        bucket = _ReadBucket({name})
        flat = self._sources.open(bucket)[name]
        largest = [largest_magnitudes(view(flat, piece), piece.start, self._kind) for piece in self._pieces[name]]
        if not self._sources.is_static:
            self._sources.close(bucket)
        return largest

    def _cut_tables(self, largest: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[Piece, Tensor]]:
        for name, tables in largest.items():
            for piece, table in zip(self._pieces[name], tables, strict=True):
                if piece.hf_name in self._cut:
                    yield piece, table

    def _of_whole(self, shared: Tensor, piece: Piece) -> Tensor:
        """View the blocks of a piece in its whole tensor's table."""
        offset, shape = self._cut[piece.hf_name]
        start, extent = self._kind.blocks(piece.start, piece.shape)
        return shared[offset : offset + prod(shape)].view(shape)[Rectangle(start, extent).slices()]

    def _build(self, name: str) -> Tensor:
        if name.endswith(SCALES):
            return scales_of(self._amax[name.removesuffix(SCALES)], self._kind)
        return self._quantise(name) if name in self._pieces else self._sources.open(_ReadBucket({name}))[name]

    def _free(self, name: str) -> None:
        if not name.endswith(SCALES) and name not in self._pieces and not self._sources.is_static:
            self._sources.close(_ReadBucket({name}))

    def _quantise(self, name: str) -> Tensor:
        """Quantise a buffer to a flat 8-bit tensor, or round it to the values of 8 bits."""
        bucket, amax, pieces = _ReadBucket({name}), self._amax[name], self._pieces[name]
        flat = self._sources.open(bucket)[name]
        result = eight = torch.empty(flat.shape, dtype=getattr(torch, self._kind.dtype), device=flat.device)
        if self._dequantises:
            result = torch.empty_like(flat)
        for piece, table in zip(pieces, scale_tables(pieces, self._kind), strict=True):
            largest = view(amax, table)
            quantise(view(flat, piece), piece.start, largest, self._kind, view(eight, piece))
            if self._dequantises:
                scales = scales_of(largest, self._kind)
                dequantise(view(eight, piece), piece.start, scales, self._kind, view(result, piece))
        if not self._sources.is_static:
            self._sources.close(bucket)
        return result
