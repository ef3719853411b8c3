"""Small collectives on host data: JSON instead of pickles, and reductions of named numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON-able value, in rank order. Nothing is pickled."""
    data = _encode(value)
    sizes = _gather_sizes(data.numel(), group)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    out = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(out, padded, group=group)
    return [_decode(part[:size]) for part, size in zip(out, sizes, strict=True)]


def _gather_sizes(size: int, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([size]), group=group)
    return [int(s) for s in sizes]


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenation over ranks of [n_r, ...] host tensors whose first sizes differ."""
    sizes = _gather_sizes(rows.size(0), group)
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.size(0)] = rows
    out = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(out, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(out, sizes, strict=True)])


def broadcast_json(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """The JSON-able value of global rank ``source``, on every rank of the group."""
    data = _encode(value if dist.get_rank() == source else None)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source, group=group)
    return _decode(data)


def reduce_sums(values: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum over ranks of named numbers; every rank passes the same names. Names that end in ``_max`` are maximised instead."""
    names = sorted(values)
    sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
    maxima = sums.clone()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return {name: float(maxima[i] if name.endswith("_max") else sums[i]) for i, name in enumerate(names)}


def gather_json(value: Any) -> list[Any]:
    """Every rank's JSON-able value on the first rank of the world, in rank order; [] on the others."""
    data = _encode(value)
    sizes = _gather_sizes(data.numel(), None)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    out = [torch.empty_like(padded) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(padded, out, dst=0)
    return [_decode(part[:size]) for part, size in zip(out or [], sizes if out else [], strict=True)]


def all_gather_unique_json(value: Any, group: dist.ProcessGroup | None = None) -> list[tuple[Any, list[int]]]:
    """The different JSON-able values among the ranks, each with the global ranks that have it, in order of their first rank.

    A value travels once however many ranks share it, so a world of thousands of ranks with few kinds of them stays cheap.
    """
    data = _encode(value)
    digest = torch.frombuffer(bytearray(blake2b(bytes(data.tolist()), digest_size=16).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, digest, group=group)
    members = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    holders: dict[bytes, list[int]] = {}
    for rank, seen in zip(members, digests, strict=True):
        holders.setdefault(bytes(seen.tolist()), []).append(rank)
    return [(broadcast_json(value, ranks[0], group), ranks) for ranks in holders.values()]
