"""Latent attention to the keys that an indexer selects (DeepSeek-AI 2025, DeepSeek-V3.2), and its values in config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_mcore.families.base import ATTENTION, HIDDEN, MEGATRON_LAYER, Dim, Rule
from rlhf_mcore.families.latent import Q_RANK, Latent
from rlhf_mcore.families.sizes import size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import IndexerSizes, LatentSizes, ModelGeometry


def _indexer(g: ModelGeometry) -> IndexerSizes:
    assert isinstance(g.attention, LatentSizes) and g.attention.indexer is not None
    return g.attention.indexer


INDEX_QUERIES = Dim("index_queries", lambda g: _indexer(g).num_heads * _indexer(g).head_dim)
INDEX_KEY = Dim("index_key", lambda g: _indexer(g).head_dim)
INDEX_HEADS = Dim("index_heads", lambda g: _indexer(g).num_heads)

# Every rank stores the indexer whole.
INDEXER = tuple(
    Rule(
        f"{MEGATRON_LAYER}self_attention.indexer.{name}",
        "replicated",
        {f"{ATTENTION}indexer.{hf}": dims},
        "indexed",
        trained=lambda g: _indexer(g).learns,
    )
    for name, hf, dims in (
        ("queries", "wq_b.weight", (INDEX_QUERIES, Q_RANK)),
        ("keys", "wk.weight", (INDEX_KEY, HIDDEN)),
        ("norm_weight", "k_norm.weight", (INDEX_KEY,)),
        ("norm_bias", "k_norm.bias", (INDEX_KEY,)),
        ("head_weights", "weights_proj.weight", (INDEX_HEADS, HIDDEN)),
    )
)


def with_trained_indexers(geometry: ModelGeometry) -> ModelGeometry:
    """Return a geometry whose indexers are trained."""
    assert isinstance(geometry.attention, LatentSizes)
    return replace(geometry, attention=replace(geometry.attention, indexer=replace(_indexer(geometry), learns=True)))


def is_of_indexer(name: str) -> bool:
    """Return whether a Hugging Face tensor belongs to an indexer."""
    return ".self_attn.indexer." in name


@dataclass(frozen=True, slots=True)
class IndexedLatent(Latent):
    """``rotates_pairs``: as in the attention, neighbours of an indexer's head rotate together, not its halves.

    ``shares``: some layers use the keys that the last indexer before them selected (arXiv 2603.12201).
    """

    rotates_pairs: bool = False
    shares: bool = False

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return Megatron's settings."""
        indexer = self._indexer(hf_config)
        return {
            **Latent.settings(self, hf_config),
            "dsa_indexer_n_heads": indexer.num_heads,
            "dsa_indexer_head_dim": indexer.head_dim,
            "dsa_indexer_topk": indexer.top_k,
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield a difference between the layers with an indexer in transformers and in engines."""
        if not self.shares:
            return
        kinds, in_engines = _kinds(hf_config), _kinds_in_engines(hf_config)
        if kinds[0] != "full" or not set(kinds) <= {"full", "shared"}:
            yield "indexer_types must contain 'full' or 'shared' for each layer, and start with 'full'; correct it"
        elif kinds != in_engines:
            layer = next(i for i, (one, other) in enumerate(zip(kinds, in_engines, strict=True)) if one != other)
            yield (
                f"indexer_types has {kinds[layer]!r} for layer {layer}, but engines read {in_engines[layer]!r} from "
                "index_topk_pattern, or index_topk_freq and index_skip_topk_offset; correct either of them"
            )

    def _read(self, hf_config: Fields) -> LatentSizes:
        if "q_lora_rank" in hf_config.content and hf_config.content["q_lora_rank"] is None:
            size(hf_config, "q_lora_rank")  # an indexer reads the latent of queries
        return replace(Latent._read(self, hf_config), indexer=self._indexer(hf_config))

    def _indexer(self, hf_config: Fields) -> IndexerSizes:
        heads, head_dim, top_k = (size(hf_config, f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
        if head_dim < size(hf_config, "qk_rope_head_dim"):
            raise hf_config.wrong("index_head_dim", "at least qk_rope_head_dim")
        kinds = _kinds(hf_config) if self.shares else ()
        shared = tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")
        return IndexerSizes(heads, head_dim, top_k, shared_layers=shared)


def _kinds(hf_config: Fields) -> list[str]:
    """Return "full" for every layer with an indexer, and "shared" for every other layer."""
    num_layers = size(hf_config, "num_hidden_layers")
    kinds = hf_config.texts("indexer_types", default=None) or _kinds_in_engines(hf_config)
    if len(kinds) != num_layers:
        raise hf_config.wrong("indexer_types", f"a list of {num_layers} texts, one per layer")
    return kinds


def _kinds_in_engines(hf_config: Fields) -> list[str]:
    num_layers = size(hf_config, "num_hidden_layers")
    if (pattern := hf_config.text("index_topk_pattern", default=None)) is not None:
        if len(pattern) != num_layers or not set(pattern) <= {"F", "S"}:
            raise hf_config.wrong("index_topk_pattern", f"{num_layers} letters F or S, one per layer")
        return ["shared" if letter == "S" else "full" for letter in pattern]
    every = hf_config.integer("index_topk_freq", 1, num_layers, default=1)
    first = hf_config.integer("index_skip_topk_offset", 0, num_layers, default=2) - 1
    return ["shared" if max(layer - first, 0) % every else "full" for layer in range(num_layers)]
