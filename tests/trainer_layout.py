"""Compute the places of tensors on trainer ranks from layouts and the families' rules, for plans without a model."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.map.rules import layer_names, pieces
from rlhf_mcore.families import end_rules
from rlhf_mcore.families.mtp import EMBEDDING_COPY
from rlhf_mcore.geometry import ModelGeometry, Shard
from rlhf_mcore.parallel.layout import ParallelLayout, is_expert


def trainer_places(
    names_by_stage: Sequence[Sequence[str]], geometry: ModelGeometry, layout: ParallelLayout
) -> list[Place]:
    """List the places of every trainer rank.

    ``names_by_stage`` contains Megatron's parameter names for each pipeline rank. Layers are numbered over the
    whole model; experts are numbered within their rank.

    Raises:
        KeyError: the family has no rule for a parameter.
    """
    assert len(names_by_stage) == layout.pp, (len(names_by_stage), layout.pp)
    places = []
    for stage, names in enumerate(names_by_stage):
        grids = ([name for name in names if not is_expert(name)], [name for name in names if is_expert(name)])
        for stage_names, shards in zip(grids, _shards(layout, stage), strict=True):
            places += [
                Place(name, tuple(pieces(name, geometry, shard)), ranks)
                for shard, ranks in shards
                for name in stage_names
            ]
    return places


def _shards(layout: ParallelLayout, pp: int) -> tuple[list[tuple[Shard, range]], list[tuple[Shard, range]]]:
    """List the shards of a stage's dense parameters and of its experts, each with its ranks."""
    dense = [(Shard(tp, layout.tp), replicas(layout, tp, pp)) for tp in range(layout.tp)]
    grid = [(etp, ep) for ep in range(layout.ep) for etp in range(layout.expert_tp)]
    return dense, [
        (Shard(etp, layout.expert_tp, ep, layout.ep), expert_replicas(layout, etp, ep, pp)) for etp, ep in grid
    ]


def replicas(layout: ParallelLayout, tp: int, pp: int) -> range:
    """Return the data- and context-parallel replicas of one shard, as ranks."""
    first = layout.rank_of(tp=tp, pp=pp)
    return range(first, first + layout.dp * layout.cp * layout.tp, layout.tp)


def expert_replicas(layout: ParallelLayout, etp: int, ep: int, pp: int) -> range:
    """Return the ranks that store the same part of the same experts."""
    stage, size = layout.rank_of(pp=pp), layout.expert_tp * layout.ep
    first = stage + ep * layout.expert_tp + etp
    return range(first, first + layout.expert_dp * size, size)


def stage_names(geometry: ModelGeometry, layout: ParallelLayout, *, fused: bool = False) -> list[list[str]]:
    """List Megatron's parameter names on a rank of each pipeline stage, for planning without a model.

    ``fused`` selects the names of Transformer Engine's layers: norms inside linear layers, and experts as one
    grouped product. The last stage also stores a tied output layer.
    """
    stages = [
        [
            name
            for chunk in range(layout.vpp or 1)
            for layer in layout.layers_of(geometry.num_layers, stage, chunk)
            for name in layer_names(geometry, layer, geometry.num_experts // layout.ep, fused)
        ]
        for stage in range(layout.pp)
    ]
    first, last = end_rules(geometry, tied_head=layout.pp > 1)
    stages[0][:0] = [rule.mcore for rule in first]
    stages[-1] += [rule.mcore for rule in last]
    if geometry.mtp_layers and layout.num_stages > 1:
        stages[-1].append(EMBEDDING_COPY)
    for layer in geometry.mtp_numbers:
        stages[-1] += layer_names(geometry, layer, geometry.num_experts // layout.ep, fused)
    return stages


def even_nodes(num_ranks: int, ranks_per_node: int) -> list[int]:
    """Return the node of every rank, for nodes with ``ranks_per_node`` consecutive ranks each."""
    return [rank // ranks_per_node for rank in range(num_ranks)]
