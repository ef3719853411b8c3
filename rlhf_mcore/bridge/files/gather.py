"""Gather full tensors from the ranks' Megatron tensors, one at a time. This is the baseline for the planned bridge."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import find_rule, hf_shapes, pieces
from rlhf_mcore.geometry import LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.layout import is_expert
from rlhf_mcore.protocols import SyncStats, WeightTarget


class Gatherer:
    """Yield full tensors under Hugging Face names on every rank of a model. Iterating is a collective call.

    Tensor-parallel parts are all-gathered within each pipeline stage. Experts are all-gathered over
    ``expert_group`` (expert-tensor and expert parallel). The result is broadcast to the other stages.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
        expert_group: dist.ProcessGroup | None = None,
    ):
        self._geometry = geometry
        self._tp, self._pp = tp_group, pp_group
        self._tp_shards = [Shard(rank, tp_group.size()) for rank in range(tp_group.size())]
        self._experts = expert_group
        mine = next((astuple(p.shard) for p in parameters if is_expert(p.name)), None)
        assert mine is None or expert_group is not None, "experts are gathered over a group of their own"
        # A stage without experts receives other stages' experts, so it uses their shards.
        mine = next((shard for shard in all_gather_json(mine, pp_group) if shard), None)
        self._expert_shards = [Shard(*s) for s in all_gather_json(mine, expert_group) if s] if expert_group else []
        self._local = {parameter.name: parameter.tensor for parameter in parameters}
        types = {p.name: str(p.tensor.dtype).removeprefix("torch.") for p in parameters}
        stages = all_gather_json(types, pp_group)
        self._dtypes = {name: getattr(torch, dtype) for by_name in stages for name, dtype in by_name.items()}
        # Under pipeline parallelism a tied embedding is on two stages; the first stage's copy is used.
        self._owner: dict[str, int] = {}
        for stage, names in enumerate(stages):
            for name in names:
                self._owner.setdefault(name, stage)
        # Group parameters with parts of the same tensor: a layer's experts, if one tensor contains them all.
        self._together: dict[tuple[str, int], list[str]] = {}
        for name in self._owner:
            rule, layer, _ = find_rule(geometry, name)
            self._together.setdefault((rule.mcore, layer) if rule.is_stacked else (name, 0), []).append(name)
        self._shapes = hf_shapes(geometry)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        done: set[str] = set()
        for names in self._together.values():
            shards = self._expert_shards if is_expert(names[0]) else self._tp_shards
            by_name = {name: [pieces(name, self._geometry, shard) for shard in shards] for name in names}
            targets = dict.fromkeys(
                piece.hf_name for by_rank in by_name.values() for parts in by_rank for piece in parts
            )
            if done.issuperset(targets):
                continue
            done.update(targets)
            yield from self._gather(by_name, list(targets)).items()

    def _gather(self, by_name: dict[str, list[list[Piece]]], targets: list[str]) -> dict[str, Tensor]:
        """Gather whole tensors. ``by_name`` contains the pieces of one stage's parameters by rank."""
        first, like = next(iter(by_name)), next(iter(self._local.values()))
        stage, dtype = self._owner[first], self._dtypes[first]
        full = {target: like.new_empty(self._shapes[target], dtype=dtype) for target in targets}
        if self._pp.rank() == stage:
            group = self._experts if is_expert(first) else self._tp
            for name, by_rank in by_name.items():
                for rank_pieces, part in zip(by_rank, self._parts(self._local[name], by_rank, group), strict=True):
                    for piece in rank_pieces:
                        full[piece.hf_name][piece.slices] = view(part, piece)
        if self._pp.size() > 1:
            for target in targets:
                dist.broadcast(full[target], group=self._pp, group_src=stage)
        return full

    def _parts(self, local: Tensor, by_rank: list[list[Piece]], group: dist.ProcessGroup | None) -> list[Tensor]:
        if len(by_rank) == 1:
            return [local]
        places = [{(piece.hf_name, piece.start) for piece in rank_pieces} for rank_pieces in by_rank]
        if all(held == places[0] for held in places):
            return [local] * len(by_rank)  # replicated: every rank holds the same tensor
        # Each rank holds the rows of B that match its rows of the adapted matrices, so sizes differ.
        if self._geometry.adapter is not None:
            counts = [sum(prod(piece.shape) for piece in rank_pieces) for rank_pieces in by_rank]
            padded = local.new_zeros(max(*counts, local.numel()))
            padded[: local.numel()] = local.flatten()
            flat = [torch.empty_like(padded) for _ in by_rank]
            dist.all_gather(flat, padded, group=group)
            return [part[:count] for part, count in zip(flat, counts, strict=True)]
        parts = [torch.empty_like(local) for _ in by_rank]
        dist.all_gather(parts, local.contiguous(), group=group)
        return parts


@dataclass(slots=True)
class GatherBridge:
    """Sync without a plan: every rank gathers every full tensor, one at a time, and the engine takes its part."""

    gatherer: Gatherer
    target: WeightTarget

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and set their version. This is a collective call over the model's ranks."""
        started, sizes = time.perf_counter(), [0]

        def count_bytes() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.gatherer:
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        self.target.load_weights(count_bytes(), version=version)
        return SyncStats(time.perf_counter() - started, sum(sizes), 0, max(sizes))
