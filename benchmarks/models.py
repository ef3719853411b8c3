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
from rlhf_mcore.config.derive import balanced_stages
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.types import ModelGeometry


@dataclass(frozen=True, slots=True)
class Model:
    """A model's sizes."""

    name: str
    geometry: ModelGeometry


@dataclass(frozen=True, slots=True)
class Tensor:
    """One engine tensor, as the tracer would describe it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[tuple[int, int], ...] = ()


LLAMA_70B = Model("70B", ModelGeometry("llama", 80, 8192, 64, 8, 128, 28672, 128256, False))
QWEN_235B = Model(
    "235B-A22B",
    ModelGeometry("qwen3_moe", 94, 4096, 64, 4, 128, 12288, 151936, False, num_experts=128, expert_ffn_size=1536),
)


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor, in the order of the network."""
    return hf_shapes(model.geometry)


def model_bytes(model: Model) -> int:
    """Size of all tensors in bf16."""
    return 2 * sum(prod(shape) for shape in shapes(model).values())


def trainer_layout(model: Model, ranks: int, tp: int, pp: int, ep: int = 1) -> ParallelLayout:
    """A layout with stages as equal as can be, and experts that are dealt whole (expert tensor parallelism 1)."""
    stages = tuple(balanced_stages(model.geometry.num_layers, pp))
    return ParallelLayout(ranks, tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 else None, layers_per_stage=stages)


def sources(model: Model, layout: ParallelLayout) -> list[Place]:
    """What trainer ranks hold, with Transformer Engine's layers."""
    return trainer_places(stage_names(model.geometry, layout, fused=True), model.geometry, layout)


def destinations(model: Model, tp: int, num_engines: int, first_rank: int = 0) -> list[Place]:
    """What engine ranks need."""
    return engine_places([list(_engine_tensors(model, tp, rank)) for rank in range(tp)], num_engines, first_rank)


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
        yield from (_moe if geometry.is_moe_layer(layer) else _mlp)(prefix + "mlp.", geometry, tp, rank)


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
    if geometry.family in ("qwen3", "qwen3_moe"):
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


def _moe(prefix: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    hidden, count, rows = geometry.hidden_size, geometry.num_experts, geometry.expert_ffn_size // tp
    router = _rows(prefix + "gate.weight", 0, count, hidden, 0)
    yield Tensor(prefix + "gate.weight", (count, hidden), (router,))
    w13, w2 = [], []
    for expert in range(count):
        hf = f"{prefix}experts.{expert}."
        for half, name in enumerate(("gate_proj.weight", "up_proj.weight")):
            w13.append(_rows(hf + name, rank * rows, rows, hidden, (2 * expert + half) * rows))
        w2.append(_columns(hf + "down_proj.weight", hidden, rows, rank, expert * hidden * rows))
    yield Tensor(prefix + "experts.w13_weight", (count, 2 * rows, hidden), tuple(w13))
    yield Tensor(prefix + "experts.w2_weight", (count, hidden, rows), tuple(w2))


def _vector(name: str, length: int) -> Piece:
    return Piece(name, (0,), (length,), 0, (1,))


def _rows(name: str, first: int, count: int, width: int, local_row: int) -> Piece:
    return Piece(name, (first, 0), (count, width), local_row * width, (width, 1))


def _columns(name: str, rows: int, count: int, rank: int, offset: int = 0) -> Piece:
    return Piece(name, (0, rank * count), (rows, count), offset, (count, 1))
