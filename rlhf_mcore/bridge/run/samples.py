"""Compare some elements of every tensor, bit for bit, where the trainer holds them and where the engines do.

The elements of a tensor form a Latin hypercube (McKay, Beckman and Conover 1979, Technometrics 21, 239-245): of ``COUNT`` equal
ranges of each axis every one has an element, so up to ``COUNT`` shards along an axis have one each. A tensor of stacked
experts has at least one element of each expert. Another version of the weights draws other elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece

COUNT = 32
_UNKNOWN = torch.iinfo(torch.int64).min
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEPS = (
    0.0,
    0.6180339887,
    0.4142135624,
    0.7320508076,
    0.2360679775,
    0.6457513111,
)  # of an axis, in ranges of the one before; fractions of irrational numbers
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Read:
    """Elements of a flat local tensor, and their numbers among the samples of all tensors. Both int64 [n]."""

    elements: Tensor
    numbers: Tensor
    dtype: torch.dtype  # the engine's


class Samples:
    """The elements that are compared, for tensors of given shapes in the dtypes of the engines."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> None:
        self.names, self._dtypes = list(shapes), dtypes
        self.num_axes = max(map(len, shapes.values()), default=1)
        self.shapes = np.array([_pad(shape, self.num_axes, 1) for shape in shapes.values()], np.int64)
        self.counts = np.array(
            [max(COUNT, shape[0]) if len(shape) > 2 else COUNT for shape in shapes.values()], np.int64
        )
        self.firsts = np.concatenate([[0], np.cumsum(self.counts)])
        self._places = {name: number for number, name in enumerate(self.names)}
        self._strata = np.concatenate([_strata(count, self.num_axes) for count in self.counts.tolist()])

    def name_of(self, number: int) -> str:
        """Return the tensor of a sample."""
        return self.names[int(np.searchsorted(self.firsts, number, "right")) - 1]

    def coordinates(self, version: int) -> _Ints:
        """Compute the places of a version's samples in their tensors, int64 [samples, axes].

        Axes that a tensor lacks come first, and are 0.
        """
        owner = np.repeat(np.arange(len(self.names)), self.counts)
        shift = (np.arange(len(owner))[:, None] * 0.7548776662 + (version + 1) * np.array(_steps(self.num_axes))) % 1
        sizes = self.shapes[owner]
        place: _Ints = ((self._strata + shift) * sizes / self.counts[owner][:, None]).astype(np.int64)
        return np.minimum(place, sizes - 1)

    def describe(self, buffers: Iterable[tuple[str, Sequence[Piece]]]) -> Held:
        """Describe the pieces on a rank, from the ``pieces`` of its flat tensors by buffer name."""
        names, rows, tensors = list[str](), list[list[int]](), list[int]()
        for name, pieces in buffers:
            for piece in pieces:
                names.append(name)
                tensors.append(self._places[piece.hf_name])
                padded = [
                    _pad(values, self.num_axes, filler)
                    for values, filler in ((piece.start, 0), (piece.shape, 1), (piece.strides, 0))
                ]
                rows.append([piece.offset, *(value for values in padded for value in values)])
        numbers = np.array(rows, np.int64).reshape(len(rows), 1 + 3 * self.num_axes)
        kinds = [(name, self._dtypes[self.names[tensor]]) for name, tensor in zip(names, tensors, strict=True)]
        return Held(self, kinds, np.array(tensors, np.int64), numbers)


@dataclass(frozen=True, slots=True)
class Held:
    """Pieces on a rank: buffer and dtype, tensor [pieces], and offset, start, shape and strides [pieces, 1 + 3 * axes]."""

    samples: Samples
    kinds: Sequence[tuple[str, torch.dtype]]
    tensors: _Ints
    rows: _Ints

    def reads(self, version: int, device: torch.device) -> dict[str, list[Read]]:
        """Locate the samples of a version on this rank, by buffer name."""
        samples, axes = self.samples, self.samples.num_axes
        counts = samples.counts[self.tensors]
        piece = np.repeat(np.arange(len(self.tensors)), counts)
        within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        number = samples.firsts[self.tensors[piece]] + within
        rows = self.rows[piece]
        offset, start, shape, strides = rows[:, 0], *(rows[:, 1 + i * axes : 1 + (i + 1) * axes] for i in range(3))
        local = samples.coordinates(version)[number] - start
        inside = ((local >= 0) & (local < shape)).all(axis=1)
        element, number, piece = (offset + (local * strides).sum(axis=1))[inside], number[inside], piece[inside]
        both = torch.from_numpy(np.stack([element, number])).to(device)
        by_buffer: dict[str, list[Read]] = {}
        ends = np.searchsorted(piece, np.arange(1, len(self.kinds) + 1))  # pieces come one after the other
        first = 0
        for place, kind in enumerate(self.kinds):
            if place + 1 < len(self.kinds) and self.kinds[place + 1] == kind:
                continue  # neighbours of one buffer are read together
            end = int(ends[place])
            if end > first:
                by_buffer.setdefault(kind[0], []).append(Read(both[0, first:end], both[1, first:end], kind[1]))
            first = end
        return by_buffer


@dataclass(slots=True)
class Drawn:
    """Samples that a rank has read: their numbers and the bits of their values, int64 [n] each."""

    reads: Mapping[str, Sequence[Read]]
    numbers: list[Tensor] = field(default_factory=list)
    bits: list[Tensor] = field(default_factory=list)

    def add(self, buffer: str, flat: Tensor) -> None:
        """Read the samples of a flat tensor."""
        for read in self.reads.get(buffer, ()):
            # torch indexes no floats of 8 bits
            bits = flat if flat.itemsize > 1 else flat.view(torch.uint8)
            values = bits.index_select(0, read.elements).view(flat.dtype).to(read.dtype)
            self.numbers.append(read.numbers)
            self.bits.append(values.view(_BITS[values.element_size()]).to(torch.int64))


def differing(
    samples: Samples, sent: Drawn, received: Drawn, device: torch.device, group: dist.ProcessGroup
) -> list[str]:
    """Name the tensors of which this rank has received other elements than were sent. Collective over the group."""
    sent_bits = torch.full((int(samples.firsts[-1]),), _UNKNOWN, dtype=torch.int64, device=device)
    if sent.numbers:
        sent_bits[torch.cat(sent.numbers)] = torch.cat(sent.bits)
    dist.all_reduce(sent_bits, dist.ReduceOp.MAX, group=group)  # who has a copy of an element has the same
    if not received.numbers:
        return []
    numbers = torch.cat(received.numbers)
    wrong = numbers[sent_bits[numbers] != torch.cat(received.bits)].tolist()
    return list(dict.fromkeys(map(samples.name_of, wrong)))


def _pad(values: Sequence[int], length: int, filler: int) -> list[int]:
    return [filler] * (length - len(values)) + list(values)


def _steps(num_axes: int) -> Sequence[float]:
    return _STEPS[1 : num_axes + 1]


def _strata(count: int, num_axes: int) -> _Ints:
    """Return the range of every sample along each axis, [count, axes]: a permutation of the ranges each."""
    numbers = np.arange(count)
    columns = [numbers]
    for fraction in _STEPS[1:num_axes]:
        step = next(step for step in range(max(int(fraction * count), 1), 2 * count) if gcd(step, count) == 1)
        columns.append(numbers * step % count)
    return np.stack(columns, axis=1)
