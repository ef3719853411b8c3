"""Cut a file's tensors into parts, and plan which rank assembles and writes each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rectangles import contiguous_strides
from rlhf_mcore.bridge.plan.build import Plan, build_plan
from rlhf_mcore.bridge.plan.rank_plan import RankPlan


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
