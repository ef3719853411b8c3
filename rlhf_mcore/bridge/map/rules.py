"""Where Megatron's tensors are in Hugging Face coordinates: tables, one per model family, and the geometry of each kind of cut.

Pure Python: neither torch, megatron nor vllm. A rule names a Megatron parameter (``{i}`` is the layer's number over the whole
model, ``{k}`` that of an expert on its rank), how it is cut over tensor-parallel ranks, and the Hugging Face tensors that it holds
(``{e}`` is the expert's number over the whole layer). A parameter that no rule names is an error, so nothing can be left behind
silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.parallel.layout import is_expert
from rlhf_mcore.types import ModelGeometry, Shard


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a family's table."""

    mcore: str
    kind: str
    hf: tuple[str, ...]
    layers: str = "all"  # of a repeated rule: all | dense | moe


_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_QKV_WEIGHTS = tuple(_ATTENTION + f"{x}_proj.weight" for x in "qkv")
_QKV_BIASES = tuple(_ATTENTION + f"{x}_proj.bias" for x in "qkv")

_DENSE = (
    Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
    Rule("decoder.layers.{i}.input_layernorm.weight", "replicated", (_LAYER + "input_layernorm.weight",)),
    Rule(
        "decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight",
        "replicated",
        (_LAYER + "input_layernorm.weight",),
    ),
    Rule("decoder.layers.{i}.self_attention.linear_qkv.weight", "qkv", _QKV_WEIGHTS),
    Rule("decoder.layers.{i}.self_attention.linear_proj.weight", "columns", (_ATTENTION + "o_proj.weight",)),
    Rule("decoder.layers.{i}.pre_mlp_layernorm.weight", "replicated", (_LAYER + "post_attention_layernorm.weight",)),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
        "replicated",
        (_LAYER + "post_attention_layernorm.weight",),
        "dense",
    ),
    Rule(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        "gate_up",
        (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"),
        "dense",
    ),
    Rule("decoder.layers.{i}.mlp.linear_fc2.weight", "columns", (_LAYER + "mlp.down_proj.weight",), "dense"),
    Rule("decoder.final_layernorm.weight", "replicated", ("model.norm.weight",)),
)
_QKV_BIAS = (Rule("decoder.layers.{i}.self_attention.linear_qkv.bias", "qkv", _QKV_BIASES),)
_QK_NORM = (
    Rule("decoder.layers.{i}.self_attention.q_layernorm.weight", "replicated", (_ATTENTION + "q_norm.weight",)),
    Rule("decoder.layers.{i}.self_attention.k_layernorm.weight", "replicated", (_ATTENTION + "k_norm.weight",)),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A mixture of experts: its router, and its experts as modules one after the other or as one grouped matrix product."""
    megatron, expert = "decoder.layers.{i}.mlp.", _LAYER + block + ".experts.{e}."
    gate_up, downs = (expert + gate + ".weight", expert + up + ".weight"), (expert + down + ".weight",)
    return (
        Rule(megatron + "router.weight", "router", (_LAYER + block + ".gate.weight",), "moe"),
        Rule(megatron + "experts.local_experts.{k}.linear_fc1.weight", "gate_up", gate_up, "moe"),
        Rule(megatron + "experts.local_experts.{k}.linear_fc2.weight", "columns", downs, "moe"),
        Rule(megatron + "experts.linear_fc1.weight{k}", "gate_up", gate_up, "moe"),
        Rule(megatron + "experts.linear_fc2.weight{k}", "columns", downs, "moe"),
    )


FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "qwen2": _DENSE + _QKV_BIAS,
    "qwen3": _DENSE + _QK_NORM,
    "qwen3_moe": _DENSE + _QK_NORM + _experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": _DENSE + _experts("block_sparse_moe", "w1", "w3", "w2"),
}


_SCORE = Rule("output_layer.weight", "score", ("score.weight",))
HEADS: dict[str, tuple[Rule, ...]] = {
    "lm": (Rule("output_layer.weight", "vocab", ("lm_head.weight",)),),
    "token": (_SCORE, Rule("output_layer.bias", "score", ("score.bias",))),
    "sequence": (_SCORE,),
}

_IN_MEMORY = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1.weight{k}",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2.weight{k}",
}


def hf_shapes(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of a model, in the order of the network."""
    shapes: dict[str, tuple[int, ...]] = {}
    # Some tensors have two names in Megatron, depending on the layer spec; the first rule that matches is used.
    table = FAMILIES[geometry.family] + HEADS[geometry.head]
    rules = list({rule.hf: rule for rule in reversed(table)}.values())[::-1]
    once = [rule for rule in rules if "{i}" not in rule.mcore]
    repeated = [rule for rule in rules if "{i}" in rule.mcore]
    _add_shapes(shapes, geometry, once[:1], 0)
    for layer in range(geometry.num_layers):
        kinds = ("all", "moe") if geometry.is_moe_layer(layer) else ("all", "dense")
        _add_shapes(shapes, geometry, [rule for rule in repeated if rule.layers in kinds], layer)
    _add_shapes(shapes, geometry, once[1:], 0)
    return shapes


def parameter_names(geometry: ModelGeometry) -> list[str]:
    """Megatron's parameters of a whole model on one rank, in the order of the network, with the names of its fused layer spec.

    Of the names that a tensor has in different layer specs the last rule's is that of the fused one.
    """
    rules = FAMILIES[geometry.family]
    once = [rule.mcore for rule in rules if "{i}" not in rule.mcore]
    if not geometry.tied_embeddings:
        once += [rule.mcore for rule in HEADS[geometry.head]]
    names = once[:1]
    for layer in range(geometry.num_layers):
        kinds = ("all", "moe") if geometry.is_moe_layer(layer) else ("all", "dense")
        here = {rule.hf: rule.mcore for rule in rules if "{i}" in rule.mcore and rule.layers in kinds}
        for name in here.values():
            experts = range(geometry.num_experts if "{k}" in name else 1)
            names += [name.format(i=layer, k=expert) for expert in experts]
    return names + once[1:]


def in_memory(name: str) -> str | None:
    """The Megatron parameter with the rows of a tensor that transformers (since version 5) holds under another name than it saves.

    ``{k}`` in it: the tensor is a stack, one for each expert. None: the name is not one of these.
    """
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    tail = _IN_MEMORY.get(found.group(2)) if found else None
    return f"decoder.layers.{found.group(1)}.{tail}" if found and tail else None


def _add_shapes(shapes: dict[str, tuple[int, ...]], geometry: ModelGeometry, rules: list[Rule], layer: int) -> None:
    whole = Shard(0, 1)
    names = [
        rule.mcore.format(i=layer, k=expert)
        for rule in rules
        for expert in range(geometry.num_experts if "{k}" in rule.mcore else 1)
    ]
    for name in names:
        for piece in pieces(name, geometry, whole):
            end = tuple(a + b for a, b in zip(piece.start, piece.shape, strict=True))
            known = shapes.get(piece.hf_name, (0,) * len(end))
            shapes[piece.hf_name] = tuple(max(a, b) for a, b in zip(known, end, strict=True))


def pieces(name: str, geometry: ModelGeometry, shard: Shard) -> list[Piece]:
    """What a rank's Megatron parameter holds, in Hugging Face coordinates.

    Raises:
        KeyError: the family's table has no rule for this parameter.
    """
    rule, layer, local_expert = _match(geometry.family, geometry.head, name)
    expert = shard.expert_rank * (geometry.num_experts // shard.expert_size) + local_expert
    targets = tuple(target.format(i=layer, e=expert) for target in rule.hf)
    if geometry.tied_embeddings and targets == ("lm_head.weight",):
        targets = ("model.embed_tokens.weight",)
    is_vector = name.endswith(".bias")
    width = 0 if is_vector else _input_width(rule, geometry)
    return list(_KINDS[rule.kind](targets, geometry, shard, width, name))


@cache
def _match(family: str, head: str, name: str) -> tuple[Rule, int, int]:
    """The rule of a parameter, its layer, and its expert's number on its rank (0 where there is none)."""
    generic, layer, expert = name, 0, 0
    if found := re.match(r"decoder\.layers\.(\d+)\.", name):
        layer = int(found.group(1))
        generic = "decoder.layers.{i}." + name[found.end() :]
    if is_expert(name) and (found := re.search(r"(?<=\.local_experts\.)\d+|(?<=\.weight)\d+$", generic)):
        expert = int(found.group())
        generic = generic[: found.start()] + "{k}" + generic[found.end() :]
    for rule in FAMILIES[family] + HEADS[head]:
        if rule.mcore == generic:
            return rule, layer, expert
    raise KeyError(f"no rule of family {family!r} places Megatron parameter {name!r}")


def _input_width(rule: Rule, geometry: ModelGeometry) -> int:
    """Columns of the full matrix."""
    if rule.mcore.endswith("linear_proj.weight"):
        return geometry.num_heads * geometry.head_dim
    if ".linear_fc2." in rule.mcore:
        return _ffn_size(rule.mcore, geometry)
    return geometry.hidden_size


def _ffn_size(name: str, geometry: ModelGeometry) -> int:
    return geometry.expert_ffn_size if is_expert(name) else geometry.ffn_size


def _rows(hf_name: str, hf_row: int, local_row: int, count: int, width: int) -> Piece:
    """``count`` whole rows of a matrix (or elements of a vector when ``width`` is 0)."""
    if width == 0:
        return Piece(hf_name, (hf_row,), (count,), local_row, (1,))
    return Piece(hf_name, (hf_row, 0), (count, width), local_row * width, (width, 1))


def _replicated(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    length = g.head_dim if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) else g.hidden_size
    yield _rows(targets[0], 0, 0, length, 0)


def _score(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """A scalar head: one row, or its bias, whole on every rank."""
    yield _rows(targets[0], 0, 0, 1, width)


def _router(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """A row per expert, all of them on every rank."""
    yield _rows(targets[0], 0, 0, g.num_experts, width)


def _vocab(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """Equal row ranges of the padded vocabulary, clipped to the true one."""
    per_rank = g.padded_vocab(shard.size) // shard.size
    first = shard.rank * per_rank
    count = min(per_rank, g.vocab_size - first)
    if count > 0:
        yield _rows(targets[0], first, 0, count, width)


def _columns(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """Row-parallel linear: the input dimension is cut."""
    per_rank = width // shard.size
    yield Piece(targets[0], (0, shard.rank * per_rank), (g.hidden_size, per_rank), 0, (per_rank, 1))


def _gate_up(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """A gated MLP's first linear: this rank's gate rows, then its up rows."""
    per_rank = _ffn_size(name, g) // shard.size
    for half, target in enumerate(targets):
        yield _rows(target, shard.rank * per_rank, half * per_rank, per_rank, width)


def _qkv(targets: tuple[str, ...], g: ModelGeometry, shard: Shard, width: int, name: str) -> Iterator[Piece]:
    """Rows interleaved by query group (its queries, its key, its value); a rank holds an interval of the interleaved rows.

    The interval need not end at a group's border: with fewer groups than ranks Megatron cuts raw rows.
    """
    queries = g.num_heads // g.num_kv_heads * g.head_dim
    per_rank = g.num_kv_heads * (queries + 2 * g.head_dim) // shard.size
    begin, end = shard.rank * per_rank, (shard.rank + 1) * per_rank
    position = 0
    for group in range(g.num_kv_heads):
        for target, size in zip(targets, (queries, g.head_dim, g.head_dim), strict=True):
            low, high = max(position, begin), min(position + size, end)
            if low < high:
                yield _rows(target, group * size + low - position, low - begin, high - low, width)
            position += size


_KINDS: dict[str, Callable[[tuple[str, ...], ModelGeometry, Shard, int, str], Iterator[Piece]]] = {
    "replicated": _replicated,
    "router": _router,
    "score": _score,
    "vocab": _vocab,
    "columns": _columns,
    "gate_up": _gate_up,
    "qkv": _qkv,
}
