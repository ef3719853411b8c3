"""SmolLM3 (Hugging Face 2025): Llama in which every fourth layer does not rotate queries and keys."""

from typing import Any

from rlhf_mcore.families.base import DECODER, Family
from rlhf_mcore.families.sizes import size
from rlhf_mcore.foreign import Fields


def _settings(hf_config: Fields) -> dict[str, Any]:
    num_layers = size(hf_config, "num_hidden_layers")
    every = hf_config.integer("no_rope_layer_interval", 1, default=4)
    usual = [int((layer + 1) % every > 0) for layer in range(num_layers)]
    rotates = hf_config.integers("no_rope_layers", 0, 1, default=usual)  # 1: the layer rotates
    if len(rotates) < num_layers:
        raise hf_config.wrong("no_rope_layers", f"a list of num_hidden_layers={num_layers} numbers")
    return {"no_rope_freq": [1 - rotated for rotated in rotates[:num_layers]]}


FAMILY = Family(
    "smollm3",
    "SmolLM3",
    DECODER,
    tied=True,
    flags={"attention_bias": False, "mlp_bias": False},
    settings=_settings,
    window_switch="use_sliding_window",
)
