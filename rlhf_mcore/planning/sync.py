"""Traffic of a sync, from the plan that the bridge itself would make: what engines hold, without an engine.

vLLM's layout, as the tracer would describe it: queries, keys and values in one tensor, gate and up in one, experts stacked, key and
value heads replicated where there are fewer of them than ranks, the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from rlhf_mcore.bridge.map.layouts import stage_names, trainer_places
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rectangles import contiguous_strides
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.map.scales import are_quantised, num_scales, with_scales
from rlhf_mcore.bridge.plan.build import Plan, build_plan, even_nodes, spread_order
from rlhf_mcore.bridge.plan.rank_plan import DEPTH
from rlhf_mcore.config.adapter_files import adapted_modules
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.implied import sends_adapters, sent_geometry
from rlhf_mcore.config.schema import Config
from rlhf_mcore.families import FAMILIES, outer_rules
from rlhf_mcore.families.base import Kind, Rule
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.geometry import LatentSizes, ModelGeometry, Shard
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import (
    Assumptions,
    EngineGrid,
    GpuType,
    PlannedRole,
    engine_grid,
    engines_apart,
    num_engines,
)
from rlhf_mcore.planning.weights import BYTES

_VOCAB_MULTIPLE = 64
SCALE_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One engine tensor, as the tracer would describe it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[tuple[int, int], ...] = ()


def destinations(geometry: ModelGeometry, grid: EngineGrid, num_engines: int, first_rank: int = 0) -> list[Place]:
    """Place what engine ranks need."""
    tensors = [list(engine_tensors(geometry, grid, rank)) for rank in range(grid.size)]
    return engine_places(tensors, num_engines, first_rank)


@lru_cache(maxsize=1024)
def engine_numel(geometry: ModelGeometry, grid: EngineGrid) -> int:
    """Count elements of an engine rank's weights, of the stage that has most."""
    return _most(geometry, grid, lambda tensor: prod(tensor.shape))


def engine_bytes(cfg: Config, geometry: ModelGeometry, dtype: str) -> int:
    """Count bytes of an engine rank's weights."""
    kind = engine_kind(cfg.rollout.engine)
    return weight_bytes(
        geometry, engine_grid(cfg), BYTES[dtype], cfg.rollout.quantization if kind.holds_8_bits else None
    )


def sent_bytes(cfg: Config, geometry: ModelGeometry, dtype: str) -> int:
    """Count bytes of a sync of an engine rank."""
    return weight_bytes(geometry, engine_grid(cfg), BYTES[dtype], cfg.rollout.quantization)


@lru_cache(maxsize=1024)
def weight_bytes(geometry: ModelGeometry, grid: EngineGrid, width: int, quantization: str | None) -> int:
    """Count bytes of an engine rank's weights, of the stage that has most. Elements take ``width`` bytes where they have no 8 bits."""
    if quantization is None:
        return engine_numel(geometry, grid) * width
    return _most(geometry, grid, lambda tensor: _quantised_bytes(tensor, width, quantization))


def _quantised_bytes(tensor: PlannedTensor, width: int, quantization: str) -> int:
    numel, kind = prod(tensor.shape), QUANTISATIONS[quantization]
    is_narrow = are_quantised(tensor.pieces, kind)
    return numel + SCALE_BYTES * num_scales(tensor.pieces, kind) if is_narrow else numel * width


def _most(geometry: ModelGeometry, grid: EngineGrid, size_of: Callable[[PlannedTensor], int]) -> int:
    """Sum sizes of an engine rank's tensors, of the stage that has most. Layers of one kind have equal ones."""
    layers: dict[tuple[bool, bool, bool], int] = {}

    def layer_size(layer: int, rank: int) -> int:
        kind = (*geometry.layer_kind(layer), layer in geometry.mtp_numbers)
        if kind not in layers:
            layers[kind] = sum(map(size_of, _layer_tensors(geometry, _Cut.of(grid, rank), layer)))
        return layers[kind]

    return max(
        sum(map(size_of, _end_tensors(geometry, grid, rank)))
        + sum(layer_size(layer, rank) for layer in _layers_of(geometry, grid, rank))
        for rank in range(0, grid.tp * grid.pp, grid.tp)
    )


def kv_bytes_per_token(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count bytes of a token's keys and values on a rank of the stage that has most.

    With latent attention they are of the latent alone, which is on every rank.
    """
    attention = geometry.attention
    if isinstance(attention, LatentSizes):
        layers = _most_layers(grid, range(geometry.num_layers), geometry.num_layers) + geometry.mtp_layers
        return layers * (attention.kv_rank + attention.rope_dim) * width
    with_keys = [layer for layer in range(geometry.num_layers) if layer not in geometry.delta_layers]
    layers = _most_layers(grid, with_keys, geometry.num_layers) + geometry.mtp_layers
    return 2 * layers * max(1, geometry.num_kv_heads // grid.tp) * geometry.head_dim * width


def state_bytes_per_sequence(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count bytes that delta nets keep of a sequence of any length on an engine rank: fp32 states, last tokens of convolutions."""
    if (delta := geometry.delta) is None:
        return 0
    convolved = (delta.kernel - 1) * (2 * delta.keys + delta.values)
    layers = _most_layers(grid, delta.layers, geometry.num_layers)
    return layers * (4 * delta.values * delta.key_dim + width * convolved) // grid.tp


def _most_layers(grid: EngineGrid, layers: Sequence[int], num_layers: int) -> int:
    """Count the layers among these of the stage that has most of them."""
    stages = [grid.layers(num_layers, stage) for stage in range(grid.pp)]
    return max(sum(layer in stage for layer in layers) for stage in stages)


def engine_tensors(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> Iterator[PlannedTensor]:
    """Yield every parameter of a rank of an engine. What MTP layers have beside a layer is on all of the last stage."""
    yield from _end_tensors(geometry, grid, rank)
    for layer in _layers_of(geometry, grid, rank):
        yield from _layer_tensors(geometry, _Cut.of(grid, rank), layer)


def _layers_of(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> list[int]:
    stage = grid.stage(rank)
    drafting = geometry.mtp_numbers if stage == grid.pp - 1 else ()
    return [*grid.layers(geometry.num_layers, stage), *drafting]


def _end_tensors(geometry: ModelGeometry, grid: EngineGrid, rank: int) -> Iterator[PlannedTensor]:
    family, cut, stage = FAMILIES[geometry.family], _Cut.of(grid, rank), grid.stage(rank)
    is_last = stage == grid.pp - 1
    for rule in _ends(geometry, embeds=stage == 0 or (is_last and grid.drafts), is_last=is_last):
        yield _plan_rule(rule, geometry, cut, 0)
    for rule in family.vision.rules(geometry) if family.vision is not None else ():  # planned whole on every rank
        for name, shape in rule.shapes(geometry).items():
            yield PlannedTensor(name, shape, (Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape)),))


def _layer_tensors(geometry: ModelGeometry, cut: _Cut, layer: int) -> Iterator[PlannedTensor]:
    for rule in FAMILIES[geometry.family].layer_rules(geometry, layer):
        if rule.layers == "mtp":
            yield _plan_rule(replace(rule, kind="replicated"), geometry, cut, layer)
        elif rule.kind in ("delta", "delta_by_head"):
            yield from _planned_delta(rule, geometry, cut.tp, cut.rank, layer)
        else:
            yield _plan_rule(rule, geometry, cut, layer)


def _ends(geometry: ModelGeometry, *, embeds: bool, is_last: bool) -> Iterator[Rule]:
    """List the rules of what a stage has beside layers."""
    (first, last), everywhere = outer_rules(geometry), FAMILIES[geometry.family].on_every_stage
    if embeds or "embedding" in everywhere or (is_last and geometry.tied_embeddings):
        yield first
    for rule in last:
        if is_last or ("norm" if "layernorm" in rule.mcore else "output") in everywhere:
            yield rule


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cut a model for a rank of an engine: a part of each matrix, and of experts another, or whole ones."""

    tp: int
    rank: int
    expert_tp: int
    expert_rank: int
    experts: tuple[int, int]  # its number among ranks that share out whole experts, and theirs
    shares_whole: bool

    @classmethod
    def of(cls, grid: EngineGrid, rank: int) -> _Cut:
        own, sharers = grid.expert_rank(rank), grid.tp * grid.dp
        if grid.ep > 1:
            return cls(grid.tp, rank % grid.tp, 1, 0, (own, sharers), grid.tp > 1 and grid.dp > 1)
        return cls(grid.tp, rank % grid.tp, sharers, own, (0, 1), False)

    def of_experts(self, count: int) -> range:
        """Return the numbers of the experts of a layer that it has."""
        number, sharers = self.experts
        return range(number * count // sharers, (number + 1) * count // sharers)


def _plan_rule(rule: Rule, geometry: ModelGeometry, cut: _Cut, layer: int) -> PlannedTensor:
    """Plan the tensors of a rule in one engine tensor: rows below rows, expert after expert."""
    if rule.kind == "stacked":
        return _planned_stack(rule, geometry, cut, layer)
    is_expert = "{k}" in rule.mcore
    tp, rank = (cut.expert_tp, cut.expert_rank) if is_expert else (cut.tp, cut.rank)
    if cut.shares_whole and FAMILIES[geometry.family].shares_whole and "shared_experts" in rule.mcore:
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
    """Plan projections into a gated delta net, which are two tensors, the second of scalars.

    By kind they are as on a rank of the trainer.
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
    """Plan one tensor of a rank's experts, whose matrices an engine holds transposed.

    Biases of what is summed up are on the first rank that has a part of an expert.
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
    """Start and shape of a rank's rectangle in tensor ``number`` of a rule."""
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
    ):  # a head of keys or values on several ranks
        count = rows // geometry.num_kv_heads
        first = rank * geometry.num_kv_heads // tp * count
    elif kind != "replicated":
        count = rows // tp
        first = rank * count
    return (first, *(0 for _ in rest)), (count, *rest)


def _vocab_rows(geometry: ModelGeometry, tp: int) -> int:
    return -(-geometry.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp


def whole_model_places(geometry: ModelGeometry, num_ranks: int, first_rank: int = 0) -> list[Place]:
    """Place what ranks of the engine ``hf`` need: every tensor, uncut."""
    return [
        Place(
            name,
            (Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape)),),
            range(first_rank, first_rank + num_ranks),
        )
        for name, shape in hf_shapes(geometry).items()
    ]


@dataclass(frozen=True, slots=True)
class SyncBytes:
    """A sync's traffic: the busiest rank's, and all ranks' together. ``buffers`` are those of the rank with the largest ones."""

    received: int
    received_total: int
    local_total: int
    imported: int  # of the busiest rank, from other nodes
    buffers: int
    num_buckets: int
    seconds: float


def plan_sync(cfg: Config, actor: PlannedRole, world_size: int, gpu: GpuType, assumed: Assumptions) -> SyncBytes:
    """Count exact bytes, and estimate the time that they take at the given bandwidths."""
    plan = sync_plan(cfg, actor, world_size, gpu.per_node)
    counted = plan.bytes()
    received = counted.received
    # Where nodes are not distinguished, the bridge counts every rank as one.
    several = num_devices(cfg, world_size) > gpu.per_node
    imported, exported = (far * several for far in (counted.imported, counted.exported))
    link, net = gpu.nvlink_bytes_per_s * assumed.link_efficiency, gpu.network_bytes_per_s * assumed.link_efficiency
    # Links carry both directions at once. A few trainer ranks that send to many engines take longer than any engine receives.
    ways = ((received, imported), (counted.sent, exported))
    seconds = max(float(((whole - far) / link + far / net).max(initial=0.0)) for whole, far in ways)
    return SyncBytes(
        int(received.max(initial=0)),
        int(received.sum()),
        int(counted.local.sum()),
        int(imported.max(initial=0)),
        counted.peak(DEPTH),
        plan.num_buckets,
        seconds,
    )


def later_bytes(cfg: Config, actor: PlannedRole) -> int | None:
    """Count the bytes that each engine needs at the second sync and later, of a run with adapters; None without any.

    They are A and B, or the whole weights that have some, with these merged in.
    """
    if actor.adapters is None:
        return None
    if sends_adapters(cfg, actor.geometry):
        return num_parameters(actor.adapters) * BYTES[actor.dtype]
    shapes = hf_shapes(actor.geometry)
    return sum(prod(shapes[f"{module}.weight"]) for module in adapted_modules(actor.adapters)) * BYTES[actor.dtype]


def num_devices(cfg: Config, world_size: int) -> int:
    """Count the trainer's devices, and those of engines of their own."""
    return world_size + (cfg.rollout.num_engines * engine_grid(cfg).size if engines_apart(cfg) else 0)


def sync_plan(cfg: Config, actor: PlannedRole, world_size: int, ranks_per_node: int) -> Plan:
    """Make the plan of a sync, without a model and without an engine."""
    geometry, layout = sent_geometry(cfg, actor.geometry), actor.layout
    sources = trainer_places(stage_names(geometry, layout), geometry, layout)
    shapes, devices = hf_shapes(geometry), num_devices(cfg, world_size)
    engines, first = num_engines(cfg, world_size), world_size if engines_apart(cfg) else 0
    needed = (
        destinations(geometry, engine_grid(cfg), engines, first)
        if engine_kind(cfg.rollout.engine).is_sharded
        else whole_model_places(geometry, engines, first)
    )
    sizes = dict.fromkeys(shapes, BYTES[actor.dtype])
    if cfg.rollout.quantization is not None:
        kind = QUANTISATIONS[cfg.rollout.quantization]
        sources, needed, shapes = with_scales(sources, kind), with_scales(needed, kind), kind.with_scales(shapes)
        sizes = {name: sizes.get(name, SCALE_BYTES) for name in shapes} | {n: 1 for n in shapes if kind.applies(n)}
    return build_plan(
        sources,
        needed,
        element_sizes=sizes,
        bucket_bytes=cfg.bridge.bucket_bytes,
        order=spread_order(list(shapes), sources, keep_layers=False),
        nodes=even_nodes(devices, ranks_per_node) if devices > ranks_per_node else None,
    )


def estimate_seconds(cfg: Config, actor: PlannedRole, gpu: GpuType, assumed: Assumptions) -> float:
    """Guess quickly, for comparing layouts: all of an engine rank's weights come over the slowest link of its replica.

    Those of engines of their own are sent by the trainer's ranks in equal parts, to each machine once.
    """
    layout, grid = actor.layout, engine_grid(cfg)
    moved = sent_bytes(cfg, sent_geometry(cfg, actor.geometry), actor.dtype)
    if engines_apart(cfg):
        engine_ranks = cfg.rollout.num_engines * grid.size
        spread = num_devices(cfg, layout.world_size) > gpu.per_node
        copies = grid.size * -(-engine_ranks // gpu.per_node) if spread else engine_ranks
        moved = max(moved, moved * copies // layout.world_size)
    else:
        spread = layout.world_size // (layout.dp * layout.cp) > gpu.per_node
    rate = gpu.network_bytes_per_s if spread else gpu.nvlink_bytes_per_s
    return moved / (rate * assumed.link_efficiency)


def engine_places(
    tensors_by_rank: Sequence[Sequence[PlannedTensor]], num_engines: int, first_rank: int = 0
) -> list[Place]:
    """List what every engine rank needs: engines of consecutive ranks, all alike, the first one beginning at ``first_rank``."""
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
