"""Geometries, and the tensors of a model from an independent slow version: whole tensors in HF, fused tensors in Megatron."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.bridge.plan.build import Plan
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry

GEOMETRY = ModelGeometry(
    family="qwen2",
    num_layers=2,
    hidden_size=8,
    attention=GroupedSizes(4, 2, 2),
    ffn_size=16,
    vocab_size=13,
    tied_embeddings=False,
)

# For 8-bit weights: two key heads in a block of 128 rows, a block and a half of columns, and an MLP that ends within a block.
BLOCKS = ModelGeometry(
    family="qwen2",
    num_layers=2,
    hidden_size=192,
    attention=GroupedSizes(4, 2, 64),
    ffn_size=320,
    vocab_size=13,
    tied_embeddings=False,
)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[ModelGeometry, int]:
    """Return a geometry and a tensor-parallel size from 1 to 8 that Megatron supports, including sizes above the key-value heads."""
    tp = draw(st.integers(1, 8))
    kv, per_kv, head_dim = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 6]))
    heads = kv * per_kv
    # All ranks get the same number of interleaved rows and of columns of the output projection.
    head = draw(st.sampled_from(["lm", "lm", "token", "sequence"]))
    need = math.lcm(tp // math.gcd(tp, kv * (per_kv + 2)), tp // math.gcd(tp, heads))
    geometry = ModelGeometry(
        family=draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"])),
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, 5)),
        attention=GroupedSizes(heads, kv, head_dim * need),
        ffn_size=tp * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 30)),
        tied_embeddings=head == "lm" and draw(st.booleans()),
        head=head,
    )
    return geometry, tp


def hf_tensors(g: ModelGeometry) -> dict[str, Tensor]:
    """Return every tensor of a Hugging Face model. Every element has a unique number, starting at 1, so that 0 means unset."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (g.vocab_size, g.hidden_size)}
    for i in range(g.num_layers):
        p, q, kv = f"model.layers.{i}.", g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
        shapes[p + "input_layernorm.weight"] = (g.hidden_size,)
        shapes[p + "post_attention_layernorm.weight"] = (g.hidden_size,)
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[p + f"self_attn.{x}_proj.weight"] = (rows, g.hidden_size)
            if g.family == "qwen2":
                shapes[p + f"self_attn.{x}_proj.bias"] = (rows,)
            if g.family == "qwen3" and x != "v":
                shapes[p + f"self_attn.{x}_norm.weight"] = (g.head_dim,)
        shapes[p + "self_attn.o_proj.weight"] = (g.hidden_size, q)
        shapes[p + "mlp.gate_proj.weight"] = shapes[p + "mlp.up_proj.weight"] = (g.ffn_size, g.hidden_size)
        shapes[p + "mlp.down_proj.weight"] = (g.hidden_size, g.ffn_size)
    shapes["model.norm.weight"] = (g.hidden_size,)
    if g.head != "lm":
        shapes["score.weight"] = (1, g.hidden_size)
    elif not g.tied_embeddings:
        shapes["lm_head.weight"] = (g.vocab_size, g.hidden_size)
    if g.head == "token":
        shapes["score.bias"] = (1,)
    tensors, first = {}, 1
    for name, shape in shapes.items():
        tensors[name] = torch.arange(first, first + math.prod(shape), dtype=torch.float64).reshape(shape)
        first += math.prod(shape)
    return tensors


def mcore_tensors(g: ModelGeometry, hf: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """Return the tensors of a tensor-parallel Megatron rank (one stage, local layer spec), by reshaping whole tensors."""
    out = {"embedding.word_embeddings.weight": _vocab_rows(hf["model.embed_tokens.weight"], rank, tp)}
    for i in range(g.num_layers):
        p, m = f"model.layers.{i}.", f"decoder.layers.{i}."
        out[m + "input_layernorm.weight"] = hf[p + "input_layernorm.weight"]
        out[m + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if g.family == "qwen2" else ("weight",):
            fused = _interleave(g, *(hf[p + f"self_attn.{x}_proj.{kind}"] for x in "qkv"))
            out[m + f"self_attention.linear_qkv.{kind}"] = fused.chunk(tp)[rank]
        if g.family == "qwen3":
            for x in "qk":
                out[m + f"self_attention.{x}_layernorm.weight"] = hf[p + f"self_attn.{x}_norm.weight"]
        out[m + "self_attention.linear_proj.weight"] = hf[p + "self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
        gate_up = [hf[p + f"mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up")]
        out[m + "mlp.linear_fc1.weight"] = torch.cat(gate_up)
        out[m + "mlp.linear_fc2.weight"] = hf[p + "mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
    out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if g.head == "lm":
        head = hf["model.embed_tokens.weight" if g.tied_embeddings else "lm_head.weight"]
        out["output_layer.weight"] = _vocab_rows(head, rank, tp)
    for name in ("score.weight", "score.bias"):
        if name in hf:
            out[name.replace("score", "output_layer")] = hf[name]
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}


def _interleave(g: ModelGeometry, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Interleave by group: queries, key, value."""
    rest = q.shape[1:]
    parts = [x.view(g.num_kv_heads, -1, *rest) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def bucket_names(plan: Plan) -> list[list[str]]:
    """Return the tensor names of each bucket, in order. A split tensor occurs in each bucket that contains a part of it."""
    return [list(dict.fromkeys(unit.hf_name for unit in units)) for units in plan._schedule.buckets]


def _vocab_rows(matrix: Tensor, rank: int, tp: int) -> Tensor:
    """Return a rank's rows of a matrix, padded with zeros so that all ranks hold the same number of rows."""
    missing = -len(matrix) % tp
    return torch.cat([matrix, matrix.new_zeros(missing, matrix.size(1))]).chunk(tp)[rank]
