"""Places from layouts: who holds what among trainer ranks and among engines, by arithmetic and the families' rules."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise, zip_longest
from math import prod
from typing import Protocol

from rlhf_mcore.bridge.places import Place
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.rules import FAMILIES, pieces
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.types import ModelGeometry, Shard


def trainer_places(
    names_by_stage: Sequence[Sequence[str]], geometry: ModelGeometry, layout: ParallelLayout
) -> list[Place]:
    """What every trainer rank holds.

    ``names_by_stage`` are Megatron's parameter names by pipeline rank, with layers numbered over the whole model.

    Raises:
        KeyError: the family has no rule for a parameter.
    """
    assert len(names_by_stage) == layout.pp, (len(names_by_stage), layout.pp)
    return [
        Place(name, tuple(pieces(name, geometry, Shard(tp, layout.tp))), replicas(layout, tp, stage))
        for stage, names in enumerate(names_by_stage)
        for tp in range(layout.tp)
        for name in names
    ]


def replicas(layout: ParallelLayout, tp: int, pp: int) -> range:
    """Ranks with the given coordinates: the data- and context-parallel replicas of one shard."""
    first = layout.rank_of(tp=tp, pp=pp)
    return range(first, first + layout.dp * layout.cp * layout.tp, layout.tp)


class EngineTensor(Protocol):
    """What the tracer says of one tensor of an engine rank."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def pieces(self) -> tuple[Piece, ...]: ...

    @property
    def padding(self) -> tuple[tuple[int, int], ...]: ...


def engine_places(
    tensors_by_tp_rank: Sequence[Sequence[EngineTensor]], num_engines: int, first_rank: int = 0
) -> list[Place]:
    """What every engine rank needs: engines of consecutive ranks, all alike, the first one beginning at ``first_rank``."""
    tp = len(tensors_by_tp_rank)
    return [
        Place(
            tensor.name,
            tensor.pieces,
            range(first_rank + rank, first_rank + num_engines * tp, tp),
            prod(tensor.shape),
            tensor.padding,
        )
        for rank, tensors in enumerate(tensors_by_tp_rank)
        for tensor in tensors
    ]


def stage_names(geometry: ModelGeometry, num_stages: int, fused_norms: bool = False) -> list[list[str]]:
    """Megatron's parameter names by pipeline stage with layers spread evenly, for planning without a model.

    ``fused_norms`` names norms as Transformer Engine's fused linear layers do. A tied output layer is held by the last stage too.
    """
    rules = [rule.mcore for rule in FAMILIES[geometry.family]]
    other_norms = ("mlp.linear_fc1.layer_norm_weight", "linear_qkv.layer_norm_weight")
    own_norms = (".input_layernorm.weight", ".pre_mlp_layernorm.weight")
    skipped = own_norms if fused_norms else other_norms
    layer_rules = [name for name in rules if "{i}" in name and not name.endswith(skipped)]
    borders = [geometry.num_layers * stage // num_stages for stage in range(num_stages + 1)]
    stages = [
        [name.format(i=layer) for layer in range(low, high) for name in layer_rules] for low, high in pairwise(borders)
    ]
    stages[0].insert(0, "embedding.word_embeddings.weight")
    stages[-1].append("decoder.final_layernorm.weight")
    if not geometry.tied_embeddings or num_stages > 1:
        stages[-1].append("output_layer.weight")
    return stages


def spread_order(order: Sequence[str], sources: Sequence[Place], *, keep_layers: bool = True) -> list[str]:
    """An order of travel in which tensors of different owners take turns, so that more ranks send at a time.

    With ``keep_layers`` they take turns within a layer only (experts of one layer lie on different ranks); without, over the whole
    model (so all pipeline stages send at once), for engines that do not ask for layers in order.
    """
    owners: dict[str, dict[Sequence[int], None]] = defaultdict(dict)
    for place in sources:
        for piece in place.pieces:
            owners[piece.hf_name][place.ranks] = None
    spread = []
    for _, names in groupby(order, key=_layer if keep_layers else lambda _: ""):
        queues: dict[tuple[Sequence[int], ...], list[str]] = defaultdict(list)
        for name in names:
            queues[tuple(owners[name])].append(name)
        for turn in zip_longest(*queues.values()):
            spread += [name for name in turn if name is not None]
    return spread


def _layer(name: str) -> str:
    found = re.match(r"(?:.*\.)?layers\.\d+\.", name)
    return found.group() if found else name
