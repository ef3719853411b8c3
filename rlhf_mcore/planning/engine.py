"""What a vLLM engine's ranks hold: fused tensors as the tracer would describe them, and the cache of keys and values.

vLLM's layout: qkv_proj, gate_up_proj, stacked experts w13 and w2, key and value heads replicated where there are fewer of them than
ranks, the vocabulary padded to a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from rlhf_mcore.bridge.map.layouts import engine_places
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.types import ModelGeometry

_VOCAB_MULTIPLE = 64
_EXPERTS = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One engine tensor, as the tracer would describe it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[tuple[int, int], ...] = ()


def destinations(geometry: ModelGeometry, tp: int, num_engines: int, first_rank: int = 0) -> list[Place]:
    """What engine ranks need."""
    return engine_places([list(engine_tensors(geometry, tp, rank)) for rank in range(tp)], num_engines, first_rank)


@lru_cache(maxsize=64)
def engine_numel(geometry: ModelGeometry, tp: int) -> int:
    """Elements of an engine rank's weights."""
    return sum(prod(tensor.shape) for tensor in engine_tensors(geometry, tp, 0))


def kv_bytes_per_token(geometry: ModelGeometry, tp: int, width: int) -> int:
    """Keys and values of one token in all layers on one engine rank."""
    return 2 * geometry.num_layers * max(1, geometry.num_kv_heads // tp) * geometry.head_dim * width


def engine_tensors(geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    """Every parameter of rank ``rank`` of ``tp``."""
    tables = (
        ["model.embed_tokens.weight"] if geometry.tied_embeddings else ["model.embed_tokens.weight", "lm_head.weight"]
    )
    for name in tables:
        yield _vocabulary(name, geometry, tp, rank)
    yield _vector("model.norm.weight", geometry.hidden_size)
    for layer in range(geometry.num_layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", geometry, tp, rank)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield _vector(prefix + norm, geometry.hidden_size)
        yield from (_moe if geometry.is_moe_layer(layer) else _mlp)(prefix, geometry, tp, rank)


def _vocabulary(name: str, geometry: ModelGeometry, tp: int, rank: int) -> Tensor:
    width = geometry.hidden_size
    rows = -(-geometry.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp
    filled = max(0, min(rows, geometry.vocab_size - rank * rows))
    padding = ((filled * width, rows * width),) if filled < rows else ()
    pieces = (_rows(name, rank * rows, filled, width, 0),) if filled else ()
    return Tensor(name, (rows, width), pieces, padding)


def _attention(prefix: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    hidden, head = geometry.hidden_size, geometry.head_dim
    queries = geometry.num_heads // tp * head
    groups = max(1, geometry.num_kv_heads // tp) * head
    first = rank * groups if tp <= geometry.num_kv_heads else rank * geometry.num_kv_heads // tp * head
    parts = (("q", rank * queries, queries, 0), ("k", first, groups, queries), ("v", first, groups, queries + groups))
    height = queries + 2 * groups
    weights = tuple(_rows(f"{prefix}{x}_proj.weight", low, count, hidden, at) for x, low, count, at in parts)
    yield Tensor(prefix + "qkv_proj.weight", (height, hidden), weights)
    if geometry.family == "qwen2":
        biases = tuple(Piece(f"{prefix}{x}_proj.bias", (low,), (count,), at, (1,)) for x, low, count, at in parts)
        yield Tensor(prefix + "qkv_proj.bias", (height,), biases)
    if geometry.family in ("qwen3", "qwen3_moe"):
        for norm in ("q_norm.weight", "k_norm.weight"):
            yield _vector(prefix + norm, head)
    yield Tensor(
        prefix + "o_proj.weight", (hidden, queries), (_columns(prefix + "o_proj.weight", hidden, queries, rank),)
    )


def _mlp(layer: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    prefix, hidden, rows = layer + "mlp.", geometry.hidden_size, geometry.ffn_size // tp
    gate = _rows(prefix + "gate_proj.weight", rank * rows, rows, hidden, 0)
    up = _rows(prefix + "up_proj.weight", rank * rows, rows, hidden, rows)
    yield Tensor(prefix + "gate_up_proj.weight", (2 * rows, hidden), (gate, up))
    yield Tensor(
        prefix + "down_proj.weight", (hidden, rows), (_columns(prefix + "down_proj.weight", hidden, rows, rank),)
    )


def _moe(layer: str, geometry: ModelGeometry, tp: int, rank: int) -> Iterator[Tensor]:
    block, *halves, down = _EXPERTS[geometry.family]
    prefix = f"{layer}{block}."
    hidden, count, rows = geometry.hidden_size, geometry.num_experts, geometry.expert_ffn_size // tp
    yield Tensor(prefix + "gate.weight", (count, hidden), (_rows(prefix + "gate.weight", 0, count, hidden, 0),))
    w13, w2 = [], []
    for expert in range(count):
        hf = f"{prefix}experts.{expert}."
        for half, name in enumerate(halves):
            w13.append(_rows(f"{hf}{name}.weight", rank * rows, rows, hidden, (2 * expert + half) * rows))
        w2.append(_columns(f"{hf}{down}.weight", hidden, rows, rank, expert * hidden * rows))
    yield Tensor(prefix + "experts.w13_weight", (count, 2 * rows, hidden), tuple(w13))
    yield Tensor(prefix + "experts.w2_weight", (count, hidden, rows), tuple(w2))


def _vector(name: str, length: int) -> Tensor:
    return Tensor(name, (length,), (Piece(name, (0,), (length,), 0, (1,)),))


def _rows(name: str, first: int, count: int, width: int, local_row: int) -> Piece:
    return Piece(name, (first, 0), (count, width), local_row * width, (width, 1))


def _columns(name: str, rows: int, count: int, rank: int, offset: int = 0) -> Piece:
    return Piece(name, (0, rank * count), (rows, count), offset, (count, 1))


def whole_model_places(geometry: ModelGeometry, num_ranks: int) -> list[Place]:
    """What ranks of the engine ``hf`` need: every tensor, uncut."""
    return [
        Place(
            name,
            (Piece(name, (0,) * len(shape), shape, 0, (shape[1], 1) if len(shape) == 2 else (1,)),),
            range(num_ranks),
        )
        for name, shape in hf_shapes(geometry).items()
    ]
