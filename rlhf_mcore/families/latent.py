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
from rlhf_mcore.geometry import IndexerSizes, LatentSizes, ModelGeometry


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


def _indexer(g: ModelGeometry) -> IndexerSizes:
    sizes = _latent(g).indexer
    assert sizes is not None
    return sizes


INDEX_QUERIES = Dim("index_queries", lambda g: _indexer(g).num_heads * _indexer(g).head_dim)
INDEX_KEY = Dim("index_key", lambda g: _indexer(g).head_dim)
INDEX_HEADS = Dim("index_heads", lambda g: _indexer(g).num_heads)


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

# The indexer of sparse attention. It is frozen, and every rank holds it whole.
INDEXER = tuple(
    Rule(
        f"{MEGATRON_LAYER}self_attention.indexer.{name}",
        "replicated",
        {f"{ATTENTION}indexer.{hf}": dims},
        trained=False,
    )
    for name, hf, dims in (
        ("queries", "wq_b.weight", (INDEX_QUERIES, Q_RANK)),
        ("keys", "wk.weight", (INDEX_KEY, HIDDEN)),
        ("norm_weight", "k_norm.weight", (INDEX_KEY,)),
        ("norm_bias", "k_norm.bias", (INDEX_KEY,)),
        ("head_weights", "weights_proj.weight", (INDEX_HEADS, HIDDEN)),
    )
)


@dataclass(frozen=True, slots=True)
class Latent:
    """Read latent attention from config.json: sizes and settings.

    ``is_indexed``: an indexer selects keys.
    """

    is_indexed: bool = False

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry.

        Raises:
            ConfigError: a size is missing or invalid, or the rotated part of a head is odd.
        """
        return {"attention": self._sizes(hf_config)}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return Megatron's settings."""
        sizes, rope, is_yarn = self._sizes(hf_config), rotary(hf_config), rope_type(hf_config) == "yarn"
        indexer = sizes.indexer
        of_indexer = (
            {}
            if indexer is None
            else {
                "dsa_indexer_n_heads": indexer.num_heads,
                "dsa_indexer_head_dim": indexer.head_dim,
                "dsa_indexer_topk": indexer.top_k,
            }
        )
        return {
            **of_indexer,
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
        if "index_topk" in hf_config and not self.is_indexed:
            yield "index_topk is supported for DeepseekV32ForCausalLM only; use another model"

    def _sizes(self, hf_config: Fields) -> LatentSizes:
        rope = size(hf_config, "qk_rope_head_dim")
        if rope % 2:
            raise hf_config.wrong("qk_rope_head_dim", "an even number, as rotary embeddings need it")
        # Null means queries without a latent. Without the key, transformers has a default.
        is_direct = not self.is_indexed and hf_config.content.get("q_lora_rank", 0) is None
        return LatentSizes(
            num_heads=size(hf_config, "num_attention_heads"),
            head_dim=size(hf_config, "qk_nope_head_dim") + rope,
            rope_dim=rope,
            value_dim=size(hf_config, "v_head_dim"),
            kv_rank=size(hf_config, "kv_lora_rank"),
            q_rank=0 if is_direct else size(hf_config, "q_lora_rank"),
            indexer=self._indexer(hf_config) if self.is_indexed else None,
        )

    @staticmethod
    def _indexer(hf_config: Fields) -> IndexerSizes:
        sizes = IndexerSizes(*(size(hf_config, f"index_{name}") for name in ("n_heads", "head_dim", "topk")))
        if sizes.head_dim < size(hf_config, "qk_rope_head_dim"):
            raise hf_config.wrong("index_head_dim", "at least qk_rope_head_dim")
        return sizes
