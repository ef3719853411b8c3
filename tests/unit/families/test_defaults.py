"""Remove the keys of a config.json one by one. A missing key is read with transformers' default, or rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry

Content = dict[str, Any]
SECTIONS = ("text_config", "vision_config")
COMMON = PreTrainedConfig().to_dict()  # keys without sizes
# Differences from transformers' default config.json, which no published model has in this form.
_SECTIONS_OF_HEADS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}}
CHANGES: dict[str, Content] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v32": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gemma3": {"mm_tokens_per_image": 196, "vision_config": {"vision_use_head": False}},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "indexer_rope_interleave": True},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2_5_vl": {"text_config": {**_SECTIONS_OF_HEADS, "head_dim": 128}, "vision_config": {"out_hidden_size": 8192}},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_vl": {"text_config": _SECTIONS_OF_HEADS, "vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"text_config": _SECTIONS_OF_HEADS, "vision_config": {"out_hidden_size": 2048}},
}


def read(family: str, content: Content) -> tuple[ModelGeometry, Content, list[str]] | str:
    """Return geometry, settings and problems of a config.json, or the error."""
    fields = Fields(content, "config.json", "correct it")
    try:
        problems = list(FAMILIES[family].problems(fields, "architecture"))
        geometry = FAMILIES[family].geometry(fields)
        settings = FAMILIES[family].megatron_settings(fields)
    except ConfigError as error:
        return str(error)
    return replace(geometry, max_positions=0), settings, problems  # a missing maximum is unknown


def merge(content: Content, changes: Content) -> Content:
    inner = {key: merge(content[key], changes[key]) for key in SECTIONS if key in changes}
    return {**content, **changes, **inner}


def without_each_key(content: Content) -> Iterator[tuple[str, Content]]:
    """Yield each key, and the content without it."""
    for key, value in content.items():
        yield key, {name: held for name, held in content.items() if name != key}
        if key in SECTIONS:
            yield from ((f"{key}.{inner}", {**content, key: held}) for inner, held in without_each_key(value))


def is_rejected(found: object) -> bool:
    return isinstance(found, str) or (isinstance(found, tuple) and bool(found[2]))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_missing_key_has_the_default_of_transformers(family: str) -> None:
    config_class, differences = CONFIG_MAPPING[family], {}
    whole = merge(config_class().to_dict(), CHANGES.get(family, {}))
    whole.get("text_config", whole)["num_attention_heads"] *= 2  # so that no default equals this number by chance
    assert not is_rejected(read(family, whole)), read(family, whole)
    for key, content in without_each_key(whole):
        if key in COMMON or is_rejected(found := read(family, content)):
            continue
        if found != (expected := read(family, config_class.from_dict(content).to_dict())):
            differences[key] = (found, expected)
    assert differences == {}
