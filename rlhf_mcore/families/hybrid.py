"""Decoder rules for models with gated delta nets in most layers and gated attention in the others (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from dataclasses import replace

from rlhf_mcore.families.base import DECODER, HEAD_DIM, HIDDEN, KV, ONE, Dim, Kind, Rule, qk_norm
from rlhf_mcore.geometry import DeltaSizes, ModelGeometry


def _delta(g: ModelGeometry) -> DeltaSizes:
    assert g.delta is not None
    return g.delta


GATED_QUERIES = Dim("gated_queries", lambda g: 2 * g.num_heads * g.head_dim)
VALUE_HEADS = Dim("delta_value_heads", lambda g: _delta(g).value_heads)
VALUE_DIM = Dim("delta_value_dim", lambda g: _delta(g).value_dim)
KERNEL = Dim("delta_kernel", lambda g: _delta(g).kernel)
KEYS_AND_VALUES = Dim("delta_keys_and_values", lambda g: 2 * _delta(g).keys + _delta(g).values)
VALUES = Dim("delta_values", lambda g: _delta(g).values)
QKVZ = Dim("delta_qkvz", lambda g: 2 * _delta(g).keys + 2 * _delta(g).values)
# Qwen3.5's projections, in the order of their rows on a rank. Qwen3-Next joins the first two, and the last two, by
# key head.
APART = {"in_proj_qkv": KEYS_AND_VALUES, "in_proj_z": VALUES, "in_proj_b": VALUE_HEADS, "in_proj_a": VALUE_HEADS}
HYBRID_SETTINGS = {"qk_layernorm": True, "attention_output_gate": True, "layernorm_zero_centered_gamma": True}
# Only vLLM reads these.
GATED_FLAGS = {"attn_output_gate": True, "layer_scale": False}
BETA_ALPHA = Dim("delta_beta_alpha", lambda g: 2 * _delta(g).value_heads)
_MEGATRON, _LAYER = "decoder.layers.{i}.self_attention.", "model.layers.{i}."


def delta_net(kind: Kind, **inputs: Dim) -> tuple[Rule, ...]:
    """Return the rules of a gated delta net. ``inputs``: its input projections in files, with their numbers of rows."""

    def rule(name: str, kind: Kind, tensors: dict[str, tuple[Dim, ...]]) -> Rule:
        return Rule(
            _MEGATRON + name, kind, {f"{_LAYER}linear_attn.{hf}": dims for hf, dims in tensors.items()}, "delta"
        )

    return (
        Rule(
            "decoder.layers.{i}.input_layernorm.weight",
            "replicated",
            {_LAYER + "input_layernorm.weight": (HIDDEN,)},
            "delta",
        ),
        rule("in_proj.weight", kind, {f"{name}.weight": (rows, HIDDEN) for name, rows in inputs.items()}),
        rule("conv1d.weight", "delta", {"conv1d.weight": (KEYS_AND_VALUES, ONE, KERNEL)}),
        rule("dt_bias", "column_parallel", {"dt_bias": (VALUE_HEADS,)}),
        rule("A_log", "column_parallel", {"A_log": (VALUE_HEADS,)}),
        rule("out_norm.weight", "replicated", {"norm.weight": (VALUE_DIM,)}),
        rule("out_proj.weight", "row_parallel", {"out_proj.weight": (HIDDEN, VALUES)}),
    )


def _in_hybrid(rule: Rule) -> Rule:
    """Restrict a decoder's rule to layers with attention. Their queries have gates here."""
    if "self_attention" not in rule.mcore and "input_layernorm" not in rule.mcore:
        return rule
    if rule.kind != "qkv":
        return replace(rule, layers="attention")
    attention = _LAYER + "self_attn."
    tensors = {
        attention + "q_proj.weight": (GATED_QUERIES, HIDDEN),
        **{f"{attention}{x}_proj.weight": (KV, HIDDEN) for x in "kv"},
    }
    return replace(rule, kind="gated_qkv", tensors=tensors, layers="attention")


GATED_DECODER = tuple(map(_in_hybrid, DECODER + qk_norm(HEAD_DIM)))
