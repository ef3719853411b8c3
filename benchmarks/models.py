"""Large models for planning without a GPU: their sizes, and what trainer and engine ranks hold of them.

The engine side follows vLLM's fused layout: qkv_proj, gate_up_proj, stacked experts w13 and w2, key and value heads replicated when
there are fewer of them than ranks, the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rlhf_mcore.bridge.places import Place
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.rules import hf_shapes
from rlhf_mcore.bridge.sources import engine_places, stage_names, trainer_places
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.types import ModelGeometry


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of every layer; they take the place of the dense MLP."""

    count: int
    ffn_size: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model's sizes."""

    name: str
    geometry: ModelGeometry
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One engine tensor, as the tracer would describe it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[tuple[int, int], ...] = ()


LLAMA_70B = Model("70B", ModelGeometry("llama", 80, 8192, 64, 8, 128, 28672, 128256, False))
QWEN_235B = Model("235B-A22B", ModelGeometry("qwen3", 94, 4096, 64, 4, 128, 12288, 151936, False), Experts(128, 1536))


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the network."""
    dense = hf_shapes(model.geometry)
    if model.experts is None:
        return dense
    found: dict[str, tuple[int, ...]] = {}
    hidden, ffn = model.geometry.hidden_size, model.experts.ffn_size
    for name, shape in dense.items():
        if name.endswith(".mlp.gate_proj.weight"):
            prefix = name.removesuffix("gate_proj.weight")
            found[prefix + "gate.weight"] = (model.experts.count, hidden)
            for expert in range(model.experts.count):
                found[f"{prefix}experts.{expert}.gate_proj.weight"] = (ffn, hidden)
                found[f"{prefix}experts.{expert}.up_proj.weight"] = (ffn, hidden)
                found[f"{prefix}experts.{expert}.down_proj.weight"] = (hidden, ffn)
        elif ".mlp." not in name:
            found[name] = shape
    return found


def model_bytes(model: Model) -> int:
    """Size of all tensors in bf16."""
    return 2 * sum(prod(shape) for shape in shapes(model).values())


def sources(model: Model, layout: ParallelLayout, ep: int = 1) -> list[Place]:
    """What trainer ranks hold. Experts are spread over ``ep`` consecutive ranks of a stage, whole (expert tensor parallelism 1)."""
    names = stage_names(model.geometry, layout.pp, fused_norms=model.experts is None)
    if model.experts is None:
        return trainer_places(names, model.geometry, layout)
    dense = [[name for name in stage if ".mlp." not in name] for stage in names]
    places = trainer_places(dense, model.geometry, layout)
    for stage, kept in enumerate(dense):
        size = layout.world_size // layout.pp
        ranks = range(stage * size, (stage + 1) * size)
        layers = [int(name.split(".")[2]) for name in kept if name.endswith("linear_qkv.weight")]
        for layer in layers:
            places += _expert_sources(model.experts, model.geometry.hidden_size, layer, ranks, ep)
    return places


def destinations(model: Model, tp: int, num_engines: int, first_rank: int = 0) -> list[Place]:
    """What engine ranks need."""
    return engine_places([list(_engine_tensors(model, tp, rank)) for rank in range(tp)], num_engines, first_rank)


def _expert_sources(experts: Experts, hidden: int, layer: int, ranks: range, ep: int) -> Iterator[Place]:
    prefix = f"model.layers.{layer}.mlp."
    router = Piece(prefix + "gate.weight", (0, 0), (experts.count, hidden), 0, (hidden, 1))
    yield Place(f"decoder.layers.{layer}.mlp.router.weight", (router,), ranks)
    each, ffn = experts.count // ep, experts.ffn_size
    for expert in range(experts.count):
        owner, local = divmod(expert, each)
        owners = range(ranks.start + owner, ranks.stop, ep)
        name, hf = f"decoder.layers.{layer}.mlp.experts.local_experts.{local}.", f"{prefix}experts.{expert}."
        gate = Piece(hf + "gate_proj.weight", (0, 0), (ffn, hidden), 0, (hidden, 1))
        up = Piece(hf + "up_proj.weight", (0, 0), (ffn, hidden), ffn * hidden, (hidden, 1))
        down = Piece(hf + "down_proj.weight", (0, 0), (hidden, ffn), 0, (ffn, 1))
        yield Place(name + "linear_fc1.weight", (gate, up), owners)
        yield Place(name + "linear_fc2.weight", (down,), owners)


def _engine_tensors(model: Model, tp: int, rank: int) -> Iterator[Tensor]:
    geometry = model.geometry
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield _vocabulary(name, geometry, tp, rank)
    yield Tensor("model.norm.weight", (geometry.hidden_size,), (_vector("model.norm.weight", geometry.hidden_size),))
    for layer in range(geometry.num_layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", geometry, tp, rank)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield Tensor(prefix + norm, (geometry.hidden_size,), (_vector(prefix + norm, geometry.hidden_size),))
        if model.experts is None:
            yield from _mlp(prefix + "mlp.", geometry, tp, rank)
        else:
            yield from _moe(prefix + "mlp.", geometry.hidden_size, model.experts, tp, rank)


def _vocabulary(name: str, geometry: ModelGeometry, tp: int, rank: int) -> Tensor:
    width = geometry.hidden_size
    rows = -(-geometry.vocab_size // 64) * 64 // tp
    filled = min(rows, geometry.vocab_size - rank * rows)
    padding = ((filled * width, rows * width),) if filled < rows else ()
    return Tensor(name, (rows, width), (_rows(name, rank * rows, filled, width, 0),), padding)


def _attention(prefix: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    hidden, head = geometry.hidden_size, geometry.head_dim
    queries = geometry.num_heads // tp * head
    groups = max(1, geometry.num_kv_heads // tp) * head
    first = rank * groups if tp <= geometry.num_kv_heads else rank * geometry.num_kv_heads // tp * head
    held = (
        _rows(prefix + "q_proj.weight", rank * queries, queries, hidden, 0),
        _rows(prefix + "k_proj.weight", first, groups, hidden, queries),
        _rows(prefix + "v_proj.weight", first, groups, hidden, queries + groups),
    )
    yield Tensor(prefix + "qkv_proj.weight", (queries + 2 * groups, hidden), held)
    if geometry.family == "qwen3":
        for norm in ("q_norm.weight", "k_norm.weight"):
            yield Tensor(prefix + norm, (head,), (_vector(prefix + norm, head),))
    yield Tensor(
        prefix + "o_proj.weight", (hidden, queries), (_columns(prefix + "o_proj.weight", hidden, queries, rank),)
    )


def _mlp(prefix: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    hidden, rows = geometry.hidden_size, geometry.ffn_size // tp
    gate = _rows(prefix + "gate_proj.weight", rank * rows, rows, hidden, 0)
    up = _rows(prefix + "up_proj.weight", rank * rows, rows, hidden, rows)
    yield Tensor(prefix + "gate_up_proj.weight", (2 * rows, hidden), (gate, up))
    yield Tensor(
        prefix + "down_proj.weight", (hidden, rows), (_columns(prefix + "down_proj.weight", hidden, rows, rank),)
    )


def _moe(prefix: str, hidden: int, experts: Experts, tp: int, rank: int) -> Iterator[Tensor]:
    rows = experts.ffn_size // tp
    router = _rows(prefix + "gate.weight", 0, experts.count, hidden, 0)
    yield Tensor(prefix + "gate.weight", (experts.count, hidden), (router,))
    w13, w2 = [], []
    for expert in range(experts.count):
        hf = f"{prefix}experts.{expert}."
        for half, name in enumerate(("gate_proj.weight", "up_proj.weight")):
            w13.append(_rows(hf + name, rank * rows, rows, hidden, (2 * expert + half) * rows))
        w2.append(_columns(hf + "down_proj.weight", hidden, rows, rank, expert * hidden * rows))
    yield Tensor(prefix + "experts.w13_weight", (experts.count, 2 * rows, hidden), tuple(w13))
    yield Tensor(prefix + "experts.w2_weight", (experts.count, hidden, rows), tuple(w2))


def _vector(name: str, length: int) -> Piece:
    return Piece(name, (0,), (length,), 0, (1,))


def _rows(name: str, first: int, count: int, width: int, local_row: int) -> Piece:
    return Piece(name, (first, 0), (count, width), local_row * width, (width, 1))


def _columns(name: str, rows: int, count: int, rank: int, offset: int = 0) -> Piece:
    return Piece(name, (0, rank * count), (rows, count), offset, (count, 1))
