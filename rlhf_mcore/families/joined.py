"""Rules for files that stack gate and up matrices, or queries, keys and values, in one tensor (Phi-3, GLM-4)."""

from __future__ import annotations

from dataclasses import replace

from rlhf_mcore.families.base import ATTENTION, HF_LAYER, HIDDEN, Dim, Rule

_TWO_FFN = Dim("two_ffn", lambda g: 2 * g.ffn_size)
_QKV = Dim("queries_keys_values", lambda g: (g.num_heads + 2 * g.num_kv_heads) * g.head_dim)


def join_mlp(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return a decoder's rules for files with ``gate_up_proj``."""
    tensors = {HF_LAYER + "mlp.gate_up_proj.weight": (_TWO_FFN, HIDDEN)}
    return tuple(
        replace(rule, kind="halves", tensors=tensors) if rule.mcore.endswith(".linear_fc1.weight") else rule
        for rule in rules
    )


def join_qkv(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return a decoder's rules for files with ``qkv_proj``."""
    tensors = {ATTENTION + "qkv_proj.weight": (_QKV, HIDDEN)}
    return tuple(replace(rule, kind="joined_qkv", tensors=tensors) if rule.kind == "qkv" else rule for rule in rules)
