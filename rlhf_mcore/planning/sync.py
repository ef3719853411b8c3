"""Traffic of a sync, from the plan that the bridge itself would make: what engines hold, without an engine.

vLLM's layout, as the tracer would describe it: queries, keys and values in one tensor, gate and up in one, experts stacked, key and
value heads replicated where there are fewer of them than ranks, the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from rlhf_mcore.config.implied import sends_adapters
from rlhf_mcore.config.schema import Config
from rlhf_mcore.families import FAMILIES, outer_rules
from rlhf_mcore.families.base import Kind, Rule
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.geometry import LatentSizes, ModelGeometry, Shard
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import Assumptions, GpuType, PlannedRole, engine_tp, engines_apart, num_engines
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


def destinations(geometry: ModelGeometry, tp: int, num_engines: int, first_rank: int = 0) -> list[Place]:
    """Place what engine ranks need."""
    return engine_places([list(engine_tensors(geometry, tp, rank)) for rank in range(tp)], num_engines, first_rank)


@lru_cache(maxsize=64)
def engine_numel(geometry: ModelGeometry, tp: int) -> int:
    """Count elements of an engine rank's weights."""
    return sum(prod(tensor.shape) for tensor in engine_tensors(geometry, tp, 0))


def engine_bytes(cfg: Config, geometry: ModelGeometry, dtype: str) -> int:
    """Count bytes of an engine rank's weights."""
    kind = engine_kind(cfg.rollout.engine)
    return weight_bytes(geometry, engine_tp(cfg), BYTES[dtype], cfg.rollout.quantization if kind.holds_8_bits else None)


def sent_bytes(cfg: Config, geometry: ModelGeometry, dtype: str) -> int:
    """Count bytes of a sync of an engine rank."""
    return weight_bytes(geometry, engine_tp(cfg), BYTES[dtype], cfg.rollout.quantization)


@lru_cache(maxsize=64)
def weight_bytes(geometry: ModelGeometry, tp: int, width: int, quantization: str | None) -> int:
    """Count bytes of an engine rank's weights, whose elements take ``width`` bytes where they have no 8 bits."""
    if quantization is None:
        return engine_numel(geometry, tp) * width
    kind, total = QUANTISATIONS[quantization], 0
    for tensor in engine_tensors(geometry, tp, 0):
        numel = prod(tensor.shape)
        is_narrow = are_quantised(tensor.pieces, kind)
        total += numel + SCALE_BYTES * num_scales(tensor.pieces, kind) if is_narrow else numel * width
    return total


def kv_bytes_per_token(geometry: ModelGeometry, tp: int, width: int) -> int:
    """Count bytes of a token's keys and values on an engine rank: with latent attention the latent alone, on every rank."""
    attention = geometry.attention
    if isinstance(attention, LatentSizes):
        return geometry.num_layers * (attention.kv_rank + attention.rope_dim) * width
    return 2 * geometry.num_attention_layers * max(1, geometry.num_kv_heads // tp) * geometry.head_dim * width


def state_bytes_per_sequence(geometry: ModelGeometry, tp: int, width: int) -> int:
    """Count bytes that delta nets keep of a sequence of any length on an engine rank: fp32 states, last tokens of convolutions."""
    if (delta := geometry.delta) is None:
        return 0
    convolved = (delta.kernel - 1) * (2 * delta.keys + delta.values)
    return len(delta.layers) * (4 * delta.values * delta.key_dim + width * convolved) // tp


def engine_tensors(geometry: ModelGeometry, tp: int, rank: int) -> Iterator[PlannedTensor]:
    """Yield every parameter of rank ``rank`` of ``tp``."""
    family, (first, last) = FAMILIES[geometry.family], outer_rules(geometry)
    for rule in (first, *last):
        yield _plan_rule(rule, geometry, tp, rank, 0)
    for rule in family.vision.rules(geometry) if family.vision is not None else ():  # planned whole on every rank
        for name, shape in rule.shapes(geometry).items():
            yield PlannedTensor(name, shape, (Piece(name, (0,) * len(shape), shape, 0, contiguous_strides(shape)),))
    for layer in range(geometry.num_layers):
        for rule in family.layer_rules(geometry, layer):
            if rule.kind in ("delta", "delta_by_head"):
                yield from _planned_delta(rule, geometry, tp, rank, layer)
            else:
                yield _plan_rule(rule, geometry, tp, rank, layer)


def _plan_rule(rule: Rule, geometry: ModelGeometry, tp: int, rank: int, layer: int) -> PlannedTensor:
    """Plan the tensors of a rule in one engine tensor: rows below rows, expert after expert."""
    if rule.kind == "stacked":
        return _planned_stack(rule, geometry, tp, rank, layer)
    wholes = rule.shapes(geometry).values()
    shares = [_share(rule.kind, number, whole, geometry, tp, rank) for number, whole in enumerate(wholes)]
    experts = range(geometry.num_experts if "{k}" in rule.mcore else 1)
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
    return PlannedTensor(name, (len(experts), *shape) if "{k}" in rule.mcore else shape, tuple(held_pieces), padding)


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


def _planned_stack(rule: Rule, geometry: ModelGeometry, tp: int, rank: int, layer: int) -> PlannedTensor:
    """Plan one tensor of all experts, whose matrices an engine holds transposed. Biases of what is summed up are on the first rank."""
    ((name, whole),) = rule.shapes(geometry, layer).items()
    is_output, is_bias = "linear_fc2" in rule.mcore, len(whole) == 2
    if is_output and is_bias:
        numel = prod(whole)
        pieces = () if rank else (Piece(name, (0, 0), whole, 0, (whole[1], 1)),)
        return PlannedTensor(name, whole, pieces, ((0, numel),) if rank else ())
    axis = 1 if is_output else len(whole) - 1
    part = tuple(size // tp if number == axis else size for number, size in enumerate(whole))
    start = tuple(rank * part[axis] if number == axis else 0 for number in range(len(whole)))
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
    return world_size + (cfg.rollout.num_engines * engine_tp(cfg) if engines_apart(cfg) else 0)


def sync_plan(cfg: Config, actor: PlannedRole, world_size: int, ranks_per_node: int) -> Plan:
    """Make the plan of a sync, without a model and without an engine."""
    geometry, layout = actor.geometry.trunk, actor.layout
    sources = trainer_places(stage_names(geometry, layout), geometry, layout)
    tp, shapes, devices = cfg.rollout.layout.tp, hf_shapes(geometry), num_devices(cfg, world_size)
    engines, first = num_engines(cfg, world_size), world_size if engines_apart(cfg) else 0
    needed = (
        destinations(geometry, tp, engines, first)
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
    layout, tp = actor.layout, engine_tp(cfg)
    moved = sent_bytes(cfg, actor.geometry, actor.dtype)
    if engines_apart(cfg):
        engine_ranks = cfg.rollout.num_engines * tp
        spread = num_devices(cfg, layout.world_size) > gpu.per_node
        copies = tp * -(-engine_ranks // gpu.per_node) if spread else engine_ranks
        moved = max(moved, moved * copies // layout.world_size)
    else:
        spread = layout.world_size // (layout.dp * layout.cp) > gpu.per_node
    rate = gpu.network_bytes_per_s if spread else gpu.nvlink_bytes_per_s
    return moved / (rate * assumed.link_efficiency)


def engine_places(
    tensors_by_tp_rank: Sequence[Sequence[PlannedTensor]], num_engines: int, first_rank: int = 0
) -> list[Place]:
    """List what every engine rank needs: engines of consecutive ranks, all alike, the first one beginning at ``first_rank``."""
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
