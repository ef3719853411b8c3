"""Optimizers that keep only a momentum: SGD, and Muon for the matrices of a model's layers.

Megatron's Muon rejects gradients and state that data-parallel ranks shard by element. This module keeps such shards.
In an update, the model's ranks exchange the momentum of Hugging Face's matrices. One rank among a matrix's holders
receives all of it, computes the update and sends the parts back. (In "Distributed Muon", arXiv 2502.16982, each
holder gathers the matrix.) The update is therefore equal under every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.geometry import Shard
from rlhf_mcore.parallel.collectives import all_gather_json

_BUCKET = 1 << 26  # elements per rank in one exchange


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """A rectangle of a matrix in a model's layers.

    ``name`` and ``shape`` describe the whole matrix and are equal on all ranks.
    """

    name: str
    shape: tuple[int, int]
    start: tuple[int, int]
    extent: tuple[int, int]
    of: Callable[[Tensor], Tensor]  # views the rectangle in the flat parameter range that contains it

    @property
    def numel(self) -> int:
        return self.extent[0] * self.extent[1]


# Return the matrices in elements ``start`` to ``stop`` of a local parameter (name, shard, start, stop), or [].
Locate = Callable[[str, Shard, int, int], list[MatrixPart]]


@dataclass(slots=True)
class MuonRange:
    """A flat range [n] fp32 of a parameter that this module steps.

    ``state`` and ``group`` belong to its Megatron optimizer.
    """

    tensor: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    parts: list[MatrixPart]

    def __post_init__(self) -> None:
        if "momentum" not in self.state:
            # Counted like torch's AdamW: a rank may hold only matrices, and the count is for the whole model.
            self.state["step"] = torch.zeros((), dtype=torch.float32)
            self.state["momentum"] = torch.zeros_like(self.tensor)


class MomentumSteps:
    """Step the ranges ``held``.

    No other optimizer steps them. The steps are Muon's with ``exchange``, else SGD's.
    """

    def __init__(self, held: Sequence[MuonRange], momentum: float, exchange: MatrixExchange | None):
        self._stepped, self._momentum, self._exchange = held, momentum, exchange

    def step(self) -> None:
        """Make one update with the gradients and drop them. Collective over the model's ranks with ``exchange``."""
        updates = []
        for one in self._stepped:
            grad, one.tensor.grad = one.tensor.grad, None
            assert grad is not None
            moving = one.state["momentum"].mul_(self._momentum).add_(grad)
            updates.append(grad.add(moving, alpha=self._momentum) if self._exchange else moving)  # Nesterov momentum
        if self._exchange is not None:
            self._exchange(updates)
        for one, update in zip(self._stepped, updates, strict=True):
            lr, decay = one.group["lr"], one.group["weight_decay"]
            one.tensor.mul_(1 - lr * decay).add_(update, alpha=-lr)
            one.state["step"] += 1


@dataclass(slots=True)
class _Bucket:
    """Matrices that are exchanged together."""

    sent: list[tuple[int, MatrixPart]]  # this rank's ranges and their parts, by owner
    given: list[int]  # elements to send to each rank
    taken: list[int]  # elements to receive from each rank
    pieces: list[tuple[str, slice, slice]]  # parts of the matrices that this rank owns, in the order of arrival
    owned: dict[str, tuple[int, int]]


class MatrixExchange:
    """Replace flat ranges of matrices by the same ranges of the orthogonalised, scaled matrices."""

    def __init__(self, held: Sequence[MuonRange], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        """Plan the exchange. Collective over ``group``. ``dtype`` is used to send and to orthogonalise matrices."""
        self._group, self._dtype, self._device = group, dtype, device
        mine = [(number, part) for number, one in enumerate(held) for part in one.parts]
        everyones = all_gather_json([[part.name, part.shape, part.start, part.extent] for _, part in mine], group)
        shapes: dict[str, tuple[int, int]] = {}
        holders: dict[str, list[int]] = {}
        for rank, parts in enumerate(everyones):
            for name, (rows, columns), *_ in parts:
                shapes[name] = rows, columns
                if rank not in (ranks := holders.setdefault(name, []))[-1:]:
                    ranks.append(rank)
        owners = _owners(shapes, holders, len(everyones))
        self._buckets = []
        for names in _buckets(shapes, _BUCKET * len(everyones)):
            own = sorted(((n, p) for n, p in mine if p.name in names), key=lambda sent: owners[sent[1].name])
            num_given, num_taken = [0] * len(everyones), [0] * len(everyones)
            for _, part in own:
                num_given[owners[part.name]] += part.numel
            pieces = []
            for rank, parts in enumerate(everyones):
                for name, _, start, extent in parts:
                    if name in names and owners[name] == dist.get_rank(group):
                        num_taken[rank] += extent[0] * extent[1]
                        down, across = (slice(s, s + e) for s, e in zip(start, extent, strict=True))
                        pieces.append((name, down, across))
            owned = {name: shapes[name] for name, *_ in pieces}
            self._buckets.append(_Bucket(own, num_given, num_taken, pieces, owned))

    def __call__(self, flats: Sequence[Tensor]) -> None:
        """Replace the ranges in place. Collective over the group."""
        for bucket in self._buckets:
            parts = [part.of(flats[number]).reshape(-1).to(self._dtype) for number, part in bucket.sent]
            came = self._travel(parts, bucket.given, bucket.taken)
            matrices = {n: torch.zeros(s, dtype=self._dtype, device=self._device) for n, s in bucket.owned.items()}
            for (name, down, across), values in zip(
                bucket.pieces, came.split(self._sizes(matrices, bucket)), strict=True
            ):
                target = matrices[name][down, across]
                target.copy_(values.view_as(target))
            for name, matrix in matrices.items():
                matrices[name] = orthogonalize(matrix) * update_scale(*matrix.shape)
            back = [matrices[name][down, across].reshape(-1) for name, down, across in bucket.pieces]
            values_back = self._travel(back, bucket.taken, bucket.given)
            for (number, part), values in zip(
                bucket.sent, values_back.split([part.numel for _, part in bucket.sent]), strict=True
            ):
                target = part.of(flats[number])
                target.copy_(values.view_as(target))

    @staticmethod
    def _sizes(matrices: dict[str, Tensor], bucket: _Bucket) -> list[int]:
        return [matrices[name][down, across].numel() for name, down, across in bucket.pieces]

    def _travel(self, parts: Sequence[Tensor], given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Exchange parts as bytes, because gloo does not support bf16."""
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        sent = torch.cat([empty, *parts]).view(torch.uint8)
        came = torch.empty(sum(taken) * self._dtype.itemsize, dtype=torch.uint8, device=self._device)
        comes, goes = ([count * self._dtype.itemsize for count in counts] for counts in (taken, given))
        dist.all_to_all_single(came, sent, comes, goes, group=self._group)
        return came.view(self._dtype)


def _owners(shapes: dict[str, tuple[int, int]], holders: dict[str, list[int]], num_ranks: int) -> dict[str, int]:
    """Choose one owner among the ranks of each matrix, so that the computation is balanced."""
    loads, owners = [0] * num_ranks, {}
    cost = {name: max(shape) * min(shape) ** 2 for name, shape in shapes.items()}
    for name in sorted(shapes, key=lambda name: (-cost[name], name)):
        owners[name] = min(holders[name], key=lambda rank: (loads[rank], rank))
        loads[owners[name]] += cost[name]
    return owners


def _buckets(shapes: dict[str, tuple[int, int]], limit: int) -> list[set[str]]:
    """Group matrices into buckets of about ``limit`` elements, equal on all ranks."""
    groups: list[set[str]] = []
    size = limit
    for name, (rows, columns) in sorted(shapes.items()):
        if size >= limit:
            groups.append(set())
            size = 0
        groups[-1].add(name)
        size += rows * columns
    return groups


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients of the quintic iteration
_STEPS = 5
# Root mean square of AdamW's updates, as measured by Liu et al.
_RMS = 0.2


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate U V^T of matrix = U S V^T [m, n] by five Newton-Schulz iterations.

    The singular values of the result are 0.7 to 1.2.
    """
    first, second, third = _COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def update_scale(rows: int, columns: int) -> float:
    """Return the factor that gives a direction a root mean square of 0.2 over its elements."""
    return _RMS * math.sqrt(max(rows, columns))
