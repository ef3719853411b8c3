"""The geometry of a model from its config.json alone: no torch, no transformers, no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import ARCHITECTURES, MOE_FAMILIES, TOP_K, dense_layers, read_json
from rlhf_mcore.types import ModelGeometry

# head_dim where config.json leaves it out and it is not hidden_size / num_attention_heads.
_HEAD_DIM = {"qwen3": 128}


def read_sizes(directory: str | Path, head: str) -> tuple[ModelGeometry, int]:
    """The geometry of a model under a kind of head, whichever head its directory has, and to how many experts a token goes (0: dense).

    Raises:
        ConfigError: as ``read_geometry``.
    """
    found = read_geometry(directory)
    tied = found.tied_embeddings and head == "lm"
    hf_config = read_json(Path(directory) / "config.json", str(directory))
    return replace(found, head=head, tied_embeddings=tied), experts_per_token(hf_config)


def read_geometry(directory: str | Path) -> ModelGeometry:
    """The geometry that ``config.json`` of a Hugging Face directory describes.

    Raises:
        ConfigError: there is none, it lacks a size, or the architecture is not supported.
    """
    folder = Path(directory)
    hf_config = read_json(folder / "config.json", str(folder))
    architecture = (hf_config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{folder}: architecture {architecture} is not supported; supported are: {', '.join(ARCHITECTURES)}"
        )
    try:
        return geometry_of(hf_config, *ARCHITECTURES[architecture])
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: config.json is malformed ({error}); export the model again") from error


def geometry_of(hf_config: Mapping[str, Any], family: str, head: str) -> ModelGeometry:
    """The geometry of a family's Hugging Face config, as a mapping, under one kind of head.

    Raises:
        ValueError: a size is missing or is not a positive integer.
    """
    num_heads, hidden = _size(hf_config, "num_attention_heads"), _size(hf_config, "hidden_size")
    return ModelGeometry(
        family=family,
        num_layers=_size(hf_config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_size(hf_config, "num_key_value_heads", num_heads),
        head_dim=_size(hf_config, "head_dim", _HEAD_DIM.get(family, hidden // num_heads)),
        ffn_size=_size(hf_config, "intermediate_size"),
        vocab_size=_size(hf_config, "vocab_size"),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)) and head == "lm",
        head=head,
        **_expert_geometry(hf_config, family),
    )


def experts_per_token(hf_config: Mapping[str, Any]) -> int:
    """Experts that a token goes to; 0 for a dense model."""
    family, _ = ARCHITECTURES[hf_config["architectures"][0]]
    return int(hf_config.get("num_experts_per_tok", TOP_K[family])) if family in MOE_FAMILIES else 0


def _expert_geometry(hf_config: Mapping[str, Any], family: str) -> dict[str, Any]:
    if family not in MOE_FAMILIES:
        return {}
    # Under the name that transformers writes since version 5, or the one of Qwen3-MoE's authors.
    return dict(
        num_experts=_size(hf_config, "num_local_experts" if "num_local_experts" in hf_config else "num_experts"),
        expert_ffn_size=_size(hf_config, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        dense_layers=dense_layers(hf_config) if family == "qwen3_moe" else (),
    )


def _size(hf_config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}={value!r} is not a positive integer")
    return value
