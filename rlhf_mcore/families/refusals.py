"""Find values in a config.json that transformers, an engine and the trainer would interpret differently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rlhf_mcore.families.sizes import MAX_SIZES, ROPE_TYPES, max_positions, scaling, size
from rlhf_mcore.foreign import Fields, shorten

if TYPE_CHECKING:
    from rlhf_mcore.families.base import Family

# Keys that transformers reads for every model, or vLLM for some. No model here uses them. Their only supported
# values:
_FLAGS: Mapping[str, bool] = {"is_causal": True}
_NUMBERS: Mapping[str, float] = {"logit_scale": 1.0, "rotary_pct": 1.0, "rotary_emb_fraction": 1.0}
_ABSENT = ("dual_chunk_attention_config", "llama_4_scaling")
_PARTIAL = "partial_rotary_factor"
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def unsupported_keys(family: Family, hf_config: Fields, architecture: str) -> Iterator[str]:
    """Yield keys whose values a family does not support.

    Raises:
        ConfigError: a value has the wrong type.
    """
    for key, supported in {**_FLAGS, **family.flags}.items():
        # transformers interprets null as false, or rejects it.
        is_null = supported and key in hf_config.content and hf_config.content[key] is None
        if is_null or hf_config.flag(key, default=supported) != supported:
            asked = f"{key}={'null' if is_null else 'false'}" if supported else key
            yield f"{asked} is not supported for {architecture}; use another model"
    for key, only in {**_NUMBERS, **family.numbers}.items():
        if (number := hf_config.number(key, default=only)) != only:
            yield f"{key}={number} is not supported for {architecture}, only {only}; use another model"
    for key, needed in family.stated.items():
        value, text = hf_config.content.get(key), json.dumps(needed)
        if value is None:
            yield f'config.json has no {key}, and engines default to another value than {text}; add "{key}": {text}'
        elif value != needed:
            yield f"{key}={shorten(value)} is not supported for {architecture}, only {text}; use another model"
    for key in (*_ABSENT, *family.absent):
        if key in hf_config:
            yield f"{key} is not supported for {architecture}; use another model"


def rotation_problems(family: Family, hf_config: Fields, architecture: str) -> Iterator[str]:
    """Yield unsupported rotary settings: a kind of scaling, or partial rotation in a family that rotates whole heads.

    With partial rotation, transformers ignores the setting or fails, and vLLM rotates only that part.

    Raises:
        ConfigError: a value is missing or invalid.
    """
    hf_config.number("rope_theta", 1.0, 1e15, default=None)
    given = hf_config.object("rope_scaling", default=None) or hf_config.object("rope_parameters", default=None)
    nested = [given.object(key) for key in given if isinstance(given.content[key], Mapping)] if given else []
    if nested and family.windows is None:
        yield f"rope_parameters by kinds of layers are not supported for {architecture}; give one set for all layers"
    for rope in nested or ([given] if given else []):
        yield from _scaling_problems(family, rope)
    sets = (hf_config, *([given] if given else []), *nested)
    partial = min(_factor(held) for held in sets)
    if partial < 1.0 and not (family.rotates_partly or family.rotates_proportionally):
        yield f"{_PARTIAL}={partial} is not supported for {architecture}, whose heads rotate whole; use another model"


def _factor(fields: Fields) -> float:
    factor = fields.number(_PARTIAL, 0.0, 1.0, default=None)
    return 1.0 if factor is None else factor


def _scaling_problems(family: Family, rope: Fields) -> Iterator[str]:
    kind = scaling(rope)
    if kind == "mrope" and family.vision is not None:
        kind = "default"
    rope.number("rope_theta", 1.0, 1e15, default=None)
    if kind == "proportional" and family.rotates_proportionally:
        return
    if kind not in ROPE_TYPES:
        yield f"rope type {shorten(kind)!r} is not supported; supported are: {', '.join(ROPE_TYPES)}"
        return
    for key in _ROPE_NUMBERS.get(kind, ()):
        rope.number(key, 1e-6, 1e6)
    if kind == "llama3":
        rope.integer("original_max_position_embeddings", 1, MAX_SIZES["max_position_embeddings"])
    scale = rope.number("mscale_all_dim", default=None)
    if scale and family.latent is not None and kind != "yarn":
        yield f"mscale_all_dim is supported with rope type 'yarn' only, not {kind!r}; remove it from config.json"


def window_problems(family: Family, hf_config: Fields, architecture: str) -> Iterator[str]:
    """Yield a sliding window in a family without windows: a window that a layer uses, or that the list of layers names.

    Raises:
        ConfigError: a size is missing or invalid.
    """
    if (window := _active_window(family, hf_config)) is not None:
        yield f"{architecture} with an active sliding_window {window} is not supported; use another model"
    elif family.delta is None:
        kinds = set(hf_config.texts("layer_types", default=None) or ()) - {family.layer_type}
        if kinds:
            yield f"layer_types has {shorten(min(kinds))!r}, which is not supported for {architecture}; use another model"


def _active_window(family: Family, hf_config: Fields) -> int | None:
    absent = family.default_window if "sliding_window" not in hf_config.content else 0  # null: no window
    window = hf_config.integer("sliding_window", default=absent)
    if not window or window >= (max_positions(hf_config) or window + 1):
        return None
    if family.window_switch == "sliding_window":
        return window
    if not hf_config.flag("use_sliding_window", default=False):
        return None
    if family.window_switch == "use_sliding_window":
        return window
    first = hf_config.integer("max_window_layers", default=28)  # transformers' default for Qwen2 and Qwen3
    listed = "sliding_attention" in hf_config.texts("layer_types", default=())
    return window if listed or first < size(hf_config, "num_hidden_layers") else None
