"""The geometry of a model from its config.json alone: no torch, no transformers, no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import (
    ARCHITECTURES,
    MOE_FAMILIES,
    TOP_K,
    architecture,
    dense_layers,
    head_dim,
    num_experts,
    num_kv_heads,
    read_config,
    size,
)
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.types import ModelGeometry


def read_sizes(directory: str | Path, head: str) -> tuple[ModelGeometry, int]:
    """The geometry of a model under a kind of head, whichever head its directory has, and to how many experts a token goes (0: dense).

    Raises:
        ConfigError: as ``read_geometry``.
    """
    hf_config = read_config(directory, str(directory))
    found = _geometry(hf_config)
    top_k = size(hf_config, "num_experts_per_tok", TOP_K[found.family]) if found.num_experts else 0
    return replace(found, head=head, tied_embeddings=found.tied_embeddings and head == "lm"), top_k


def read_geometry(directory: str | Path) -> ModelGeometry:
    """The geometry that ``config.json`` of a Hugging Face directory describes.

    Raises:
        ConfigError: there is none, a size is absent or cannot be, or the architecture is not supported.
    """
    return _geometry(read_config(directory, str(directory)))


def _geometry(hf_config: Fields) -> ModelGeometry:
    name = architecture(hf_config)
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{hf_config.where}: architecture {shorten(name)} is not supported; supported are: {supported}"
        )
    return geometry_of(hf_config, *ARCHITECTURES[name])


def geometry_of(hf_config: Fields, family: str, head: str) -> ModelGeometry:
    """The geometry of a family's Hugging Face config under one kind of head.

    Raises:
        ConfigError: a size is absent or cannot be.
    """
    experts: dict[str, Any] = {}
    if family in MOE_FAMILIES:
        experts = dict(
            num_experts=num_experts(hf_config),
            expert_ffn_size=size(hf_config, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
            dense_layers=dense_layers(hf_config) if family == "qwen3_moe" else (),
        )
    return ModelGeometry(
        family=family,
        num_layers=size(hf_config, "num_hidden_layers"),
        hidden_size=size(hf_config, "hidden_size"),
        num_heads=size(hf_config, "num_attention_heads"),
        num_kv_heads=num_kv_heads(hf_config),
        head_dim=head_dim(hf_config, family),
        ffn_size=size(hf_config, "intermediate_size"),
        vocab_size=size(hf_config, "vocab_size"),
        tied_embeddings=hf_config.flag("tie_word_embeddings", default=False) and head == "lm",
        head=head,
        **experts,
    )
