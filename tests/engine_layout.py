"""Describe the tensors of vLLM engine ranks without an engine. Tests, benchmarks and tools use them as destinations of a sync.

The descriptions equal the tracer's. Queries, keys and values are in one tensor, gate and up in one tensor, and experts
are stacked. Key and value heads are replicated if there are fewer heads than ranks. The vocabulary is padded to a
multiple of 64. ``tests/e2e/bridge/test_trace.py`` compares the descriptions with vLLM's modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from rlhf_mcore.bridge.map.pieces import Piece, Place, contiguous_strides
from rlhf_mcore.bridge.map.quantised import are_quantised, num_scales
from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.families import FAMILIES, outer_rules
from rlhf_mcore.families.base import Kind, Rule
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.geometry import ModelGeometry, Shard
from rlhf_mcore.planning.inputs import EngineGrid

_VOCAB_MULTIPLE = 64
SCALE_BYTES = 4  # fp32
# Parts of vLLM 0.32's models that every stage contains, even if it does not compute them. In other models, the first stage contains
# the embedding and the last stage the rest.
_ALL = ("embedding", "norm", "output")
_ON_EVERY_STAGE = {
    **dict.fromkeys(("gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _ALL),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("embedding",)),
    "qwen3_next": ("embedding", "output"),
}
# Families whose shared expert is whole on each rank of a data-parallel engine.
_SHARES_WHOLE = ("deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text")


# Families whose norms over all heads are split like the heads.
_SPLITS_NORMS = ("minimax_m2",)


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An engine tensor, described like the tracer does."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[tuple[int, int], ...] = ()


def stage_layers(grid: EngineGrid, num_layers: int, stage: int) -> range:
    """Return the layers of a stage. As in vLLM, remaining layers go to the last stages except the very last one."""
    each, more = divmod(num_layers, grid.pp)
    sizes = [each + (grid.pp - 1 - more <= number < grid.pp - 1) for number in range(grid.pp)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def stage_of(grid: EngineGrid, rank: int) -> int:
    """Return the stage of a rank. vLLM counts tensor-parallel ranks first, then stages, then data-parallel ranks."""
    return rank // grid.tp % grid.pp


def destinations(geometry: ModelGeometry, grid: EngineGrid, num_engines: int, first_rank: int = 0) -> list[Place]:
    """Return the tensors that engine ranks need, with their places."""
    tensors = [list(engine_tensors(geometry, grid, rank)) for rank in range(grid.size)]
    return engine_places(tensors, num_engines, first_rank)


def weight_bytes(geometry: ModelGeometry, grid: EngineGrid, width: int, quantization: str | None) -> int:
    """Return the weight bytes of a rank of the largest stage. Elements that are not quantised take ``width`` bytes."""

    def size_of(tensor: PlannedTensor) -> int:
        if quantization is None or not are_quantised(tensor.pieces, QUANTISATIONS[quantization]):
            return prod(tensor.shape) * width
        return prod(tensor.shape) + SCALE_BYTES * num_scales(tensor.pieces, QUANTISATIONS[quantization])

    return max(sum(map(size_of, engine_tensors(geometry, grid, rank))) for rank in range(0, grid.tp * grid.pp, grid.tp))


def engine_tensors(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> Iterator[PlannedTensor]:
    """Yield every parameter of an engine rank. Every rank of the last stage holds the extra tensors of MTP layers."""
    yield from _end_tensors(geometry, grid, rank)
    for layer in _layers_of(geometry, grid, rank):
        yield from _layer_tensors(geometry, _Cut.of(grid, rank), layer)


def _layers_of(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> list[int]:
    stage = stage_of(grid, rank)
    drafting = geometry.mtp_numbers if stage == grid.pp - 1 else ()
    return [*stage_layers(grid, geometry.num_layers, stage), *drafting]


def _end_tensors(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> Iterator[PlannedTensor]:
    family, cut, stage = FAMILIES[geometry.family], _Cut.of(grid, rank), stage_of(grid, rank)
    is_last = stage == grid.pp - 1
    for rule in _ends(geometry, embeds=stage == 0 or (is_last and grid.drafts), is_last=is_last):
        yield _plan_rule(rule, geometry, cut, 0)
    for rule in family.vision.rules(geometry) if family.vision is not None else ():  # every rank holds whole tensors
        for name, shape in rule.shapes(geometry).items():
            yield PlannedTensor(name, shape, (Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape)),))


def _layer_tensors(geometry: ModelGeometry, cut: _Cut, layer: int) -> Iterator[PlannedTensor]:
    for rule in FAMILIES[geometry.family].layer_rules(geometry, layer):
        is_split = geometry.family in _SPLITS_NORMS and rule.mcore.endswith(
            ("q_layernorm.weight", "k_layernorm.weight")
        )
        if is_split:
            yield _plan_rule(replace(rule, kind="column_parallel"), geometry, cut, layer)
        elif rule.layers == "mtp":
            yield _plan_rule(replace(rule, kind="replicated"), geometry, cut, layer)
        elif rule.kind in ("delta", "delta_by_head"):
            yield from _planned_delta(rule, geometry, cut.tp, cut.rank, layer)
        else:
            yield _plan_rule(rule, geometry, cut, layer)


def _ends(geometry: ModelGeometry, *, embeds: bool, is_last: bool) -> Iterator[Rule]:
    """List the rules of a stage for the tensors outside its layers."""
    (first, last), everywhere = outer_rules(geometry), _ON_EVERY_STAGE.get(geometry.family, ())
    if embeds or "embedding" in everywhere or (is_last and geometry.tied_embeddings):
        yield first
    for rule in last:
        if is_last or ("norm" if "layernorm" in rule.mcore else "output") in everywhere:
            yield rule


@dataclass(frozen=True, slots=True)
class _Cut:
    """The shard of an engine rank: a part of each matrix, and a part of each expert or whole experts."""

    tp: int
    rank: int
    expert_tp: int
    expert_rank: int
    experts: tuple[int, int]  # its index among the ranks that divide whole experts, and the number of these ranks
    shares_whole: bool

    @classmethod
    def of(cls, grid: EngineGrid, rank: int) -> _Cut:
        own, sharers = rank // (grid.tp * grid.pp) * grid.tp + rank % grid.tp, grid.tp * grid.dp
        if grid.ep > 1:
            return cls(grid.tp, rank % grid.tp, 1, 0, (own, sharers), grid.tp > 1 and grid.dp > 1)
        return cls(grid.tp, rank % grid.tp, sharers, own, (0, 1), False)

    def of_experts(self, count: int) -> range:
        """Return the indices of the experts that the rank holds in a layer."""
        number, sharers = self.experts
        return range(number * count // sharers, (number + 1) * count // sharers)


def _plan_rule(rule: Rule, geometry: ModelGeometry, cut: _Cut, layer: int) -> PlannedTensor:
    """Plan the tensors of a rule in one engine tensor, concatenated by rows and by experts."""
    if rule.kind == "stacked":
        return _planned_stack(rule, geometry, cut, layer)
    is_expert = "{k}" in rule.mcore
    tp, rank = (cut.expert_tp, cut.expert_rank) if is_expert else (cut.tp, cut.rank)
    if cut.shares_whole and geometry.family in _SHARES_WHOLE and "shared_experts" in rule.mcore:
        tp, rank = 1, 0
    wholes = rule.shapes(geometry).values()
    shares = [_share(rule.kind, number, whole, geometry, tp, rank) for number, whole in enumerate(wholes)]
    experts = cut.of_experts(geometry.num_experts) if is_expert else range(1)
    width = shares[0][1][1:]
    held_pieces, offset = [], 0
    for expert in experts:
        for name, (start, held) in zip(rule.tensors, shares, strict=True):
            if held[0]:
                held_pieces.append(Piece(name.format(i=layer, e=expert), start, held, offset, (*width, 1)))
            offset += prod(held)
    numel = offset if rule.kind != "vocab_parallel" else _vocab_rows(geometry, tp) * geometry.hidden_size
    shape = (numel // len(experts) // prod(width), *width)
    padding = ((offset, numel),) if offset < numel else ()
    name = next(iter(rule.tensors)).format(i=layer, e="*")
    return PlannedTensor(name, (len(experts), *shape) if is_expert else shape, tuple(held_pieces), padding)


def _planned_delta(rule: Rule, geometry: ModelGeometry, tp: int, rank: int, layer: int) -> Iterator[PlannedTensor]:
    """Plan the input projections of a gated delta net as two tensors. The second tensor contains scalars.

    Each kind has the same layout as on a trainer rank.
    """
    shapes = rule.shapes(geometry, layer)
    scalars = list(shapes)[len(shapes) // 2 :] if len(shapes) > 1 else []
    parts = (
        pieces(rule.mcore.format(i=layer), geometry, Shard(rank, tp))
        if rule.kind == "delta"
        else [
            Piece(name, (rank * rows // tp, 0), (rows // tp, width), 0, (width, 1))
            for name, (rows, width) in shapes.items()
        ]
    )
    for is_scalar in (False, True):
        if own := [part for part in parts if (part.hf_name in scalars) == is_scalar]:
            moved = tuple(replace(part, offset=part.offset - own[0].offset) for part in own)
            rows = sum(part.shape[0] for part in own)
            yield PlannedTensor(own[0].hf_name, (rows, *own[0].shape[1:]), moved)


def _planned_stack(rule: Rule, geometry: ModelGeometry, cut: _Cut, layer: int) -> PlannedTensor:
    """Plan one tensor of a rank's experts. The engine holds their matrices transposed.

    The first rank with a part of an expert holds the biases of row-parallel matrices.
    """
    ((name, (_, *sizes)),) = rule.shapes(geometry, layer).items()
    experts = cut.of_experts(geometry.num_experts)
    whole = (len(experts), *sizes)
    is_output, is_bias = "linear_fc2" in rule.mcore, len(whole) == 2
    if is_output and is_bias:
        numel, is_summed_up = prod(whole), cut.expert_rank > 0
        pieces = () if is_summed_up else (Piece(name, (experts.start, 0), whole, 0, (whole[1], 1)),)
        return PlannedTensor(name, whole, pieces, ((0, numel),) if is_summed_up else ())
    axis = 1 if is_output else len(whole) - 1
    part = tuple(size // cut.expert_tp if number == axis else size for number, size in enumerate(whole))
    start = tuple(cut.expert_rank * part[axis] if number == axis else 0 for number in range(len(whole)))
    start = (experts.start, *start[1:])
    shape = (part[0], *reversed(part[1:]))
    strides = (prod(shape[1:]), 1) if is_bias else (prod(shape[1:]), 1, part[1])
    return PlannedTensor(name, shape, (Piece(name, start, part, 0, strides),))


def _share(
    kind: Kind, number: int, shape: tuple[int, ...], geometry: ModelGeometry, tp: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and shape of a rank's rectangle in tensor ``number`` of a rule."""
    rows, *rest = shape
    first, count = 0, rows
    if kind == "row_parallel":
        count = rest[0] // tp
        return (0, rank * count), (rows, count)
    if kind == "vocab_parallel":
        most = _vocab_rows(geometry, tp)
        first, count = rank * most, max(0, min(most, rows - rank * most))
    elif (
        kind in ("qkv", "gated_qkv") and number and tp > geometry.num_kv_heads
    ):  # several ranks hold the same head of keys or values
        count = rows // geometry.num_kv_heads
        first = rank * geometry.num_kv_heads // tp * count
    elif kind != "replicated":
        count = rows // tp
        first = rank * count
    return (first, *(0 for _ in rest)), (count, *rest)


def _vocab_rows(geometry: ModelGeometry, tp: int) -> int:
    return -(-geometry.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp


def engine_places(
    tensors_by_rank: Sequence[Sequence[PlannedTensor]], num_engines: int, first_rank: int = 0
) -> list[Place]:
    """List the tensors that every engine rank needs. Equal engines occupy consecutive ranks, starting at ``first_rank``."""
    size = len(tensors_by_rank)
    return [
        Place(
            tensor.name,
            tensor.pieces,
            range(first_rank + rank, first_rank + num_engines * size, size),
            prod(tensor.shape),
            tensor.padding,
        )
        for rank, tensors in enumerate(tensors_by_rank)
        for tensor in tensors
    ]
