"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): a latent for keys and values, optionally for queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.families.base import (
    ATTENTION,
    HIDDEN,
    INPUT_NORM,
    MEGATRON_LAYER,
    MLP,
    OUTSIDE,
    QUERIES,
    Dim,
    Kind,
    Rule,
    Spec,
)
from rlhf_mcore.families.sizes import rope_type, rotary, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import LatentSizes, ModelGeometry


def _latent(g: ModelGeometry) -> LatentSizes:
    assert isinstance(g.attention, LatentSizes)
    return g.attention


# Sizes of down projections, up projections, and direct query projections.
Q_RANK = Dim("q_rank", lambda g: _latent(g).q_rank)
KV_RANK = Dim("kv_rank", lambda g: _latent(g).kv_rank)
KV_DOWN = Dim("kv_down", lambda g: _latent(g).kv_rank + _latent(g).rope_dim)
KV_UP = Dim("kv_up", lambda g: g.num_heads * (g.head_dim - _latent(g).rope_dim + g.value_dim))
VALUES = Dim("values", lambda g: g.num_heads * g.value_dim)
DIRECT_QUERIES = Dim("direct_queries", lambda g: 0 if _latent(g).q_rank else g.num_heads * g.head_dim)


def _rule(module: str, kind: Kind, name: str, *dims: Dim, spec: Spec = "any") -> Rule:
    return Rule(f"{MEGATRON_LAYER}self_attention.{module}", kind, {f"{ATTENTION}{name}.weight": dims}, spec=spec)


LATENT_DECODER = (
    OUTSIDE[0],
    Rule(MEGATRON_LAYER + "input_layernorm.weight", "replicated", INPUT_NORM),
    _rule("linear_q_proj.weight", "column_parallel", "q_proj", DIRECT_QUERIES, HIDDEN),
    _rule("linear_q_down_proj.weight", "replicated", "q_a_proj", Q_RANK, HIDDEN),
    _rule("q_layernorm.weight", "replicated", "q_a_layernorm", Q_RANK, spec="local"),
    _rule("linear_q_up_proj.layer_norm_weight", "replicated", "q_a_layernorm", Q_RANK, spec="te"),
    _rule("linear_q_up_proj.weight", "column_parallel", "q_b_proj", QUERIES, Q_RANK),
    _rule("linear_kv_down_proj.weight", "replicated", "kv_a_proj_with_mqa", KV_DOWN, HIDDEN),
    _rule("kv_layernorm.weight", "replicated", "kv_a_layernorm", KV_RANK, spec="local"),
    _rule("linear_kv_up_proj.layer_norm_weight", "replicated", "kv_a_layernorm", KV_RANK, spec="te"),
    _rule("linear_kv_up_proj.weight", "column_parallel", "kv_b_proj", KV_UP, KV_RANK),
    _rule("linear_proj.weight", "row_parallel", "o_proj", HIDDEN, VALUES),
    *MLP,
    OUTSIDE[1],
)


@dataclass(frozen=True, slots=True)
class Latent:
    """Read latent attention from config.json: sizes and settings."""

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry.

        Raises:
            ConfigError: a size is missing or invalid, or the rotated part of a head is odd.
        """
        return {"attention": self._read(hf_config)}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return Megatron's settings."""
        sizes, rope, is_yarn = self._read(hf_config), rotary(hf_config), rope_type(hf_config) == "yarn"
        return {
            "multi_latent_attention": True,
            "q_lora_rank": sizes.q_rank or None,
            "kv_lora_rank": sizes.kv_rank,
            "qk_head_dim": sizes.head_dim - sizes.rope_dim,
            "qk_pos_emb_head_dim": sizes.rope_dim,
            "v_head_dim": sizes.value_dim,
            "qk_layernorm": True,
            "rope_type": "yarn" if is_yarn else "rope",
            "rotary_scaling_factor": rope.number("factor", default=1.0) if is_yarn else 1.0,
            "mscale": rope.number("mscale", default=1.0),
            "mscale_all_dim": rope.number("mscale_all_dim", default=0.0),
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield a key with which vLLM builds an indexer that the family does not have."""
        if "index_topk" in hf_config:
            yield "index_topk is supported for families with an indexer only; use another model"

    def _read(self, hf_config: Fields) -> LatentSizes:
        rope = size(hf_config, "qk_rope_head_dim")
        if rope % 2:
            raise hf_config.wrong("qk_rope_head_dim", "an even number, as rotary embeddings need it")
        # Null means queries without a latent. Without the key, transformers has a default.
        is_direct = hf_config.content.get("q_lora_rank", 0) is None
        return LatentSizes(
            num_heads=size(hf_config, "num_attention_heads"),
            head_dim=size(hf_config, "qk_nope_head_dim") + rope,
            rope_dim=rope,
            value_dim=size(hf_config, "v_head_dim"),
            kv_rank=size(hf_config, "kv_lora_rank"),
            q_rank=0 if is_direct else size(hf_config, "q_lora_rank"),
        )
