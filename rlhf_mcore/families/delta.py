"""Read from config.json which layers use a gated delta net instead of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.families.sizes import size
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.geometry import DeltaSizes


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of the gated delta nets, and the layers that use them.

    ``every``: without ``layer_types`` in config.json, every N-th layer has attention.
    """

    every: int = 4

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        sizes = self._sizes(hf_config)
        return {"delta": sizes if sizes.layers else None}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return Megatron's settings."""
        sizes = self._sizes(hf_config)
        return {
            "linear_attention_freq": [int(kind == "linear_attention") for kind in self._kinds(hf_config)],
            "linear_num_key_heads": sizes.key_heads,
            "linear_num_value_heads": sizes.value_heads,
            "linear_key_head_dim": sizes.key_dim,
            "linear_value_head_dim": sizes.value_dim,
            "linear_conv_kernel_dim": sizes.kernel,
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        sizes, kinds, num_layers = (
            self._sizes(hf_config),
            self._kinds(hf_config),
            size(hf_config, "num_hidden_layers"),
        )
        keys, values = sizes.key_heads, sizes.value_heads
        if values % keys:
            yield f"linear_num_value_heads={values} is not a multiple of linear_num_key_heads={keys}; export the model again"
        if (gate := hf_config.text("output_gate_type", default="silu")) not in ("silu", "swish"):  # two names of one
            yield f"output_gate_type={shorten(gate)} is not supported, only swish; use another model"
        if unknown := sorted(set(kinds) - {"linear_attention", "full_attention"}):
            yield f"layer_types has {shorten(unknown[0])!r}, which is not supported; use another model"
        if len(kinds) != num_layers:
            yield f"layer_types has {len(kinds)} layers, num_hidden_layers is {num_layers}; export the model again"
        elif "full_attention" not in kinds:
            yield "layer_types has no full_attention, which is not supported; use another model"

    def _sizes(self, hf_config: Fields) -> DeltaSizes:
        kinds = self._kinds(hf_config)
        return DeltaSizes(
            layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
            key_heads=size(hf_config, "linear_num_key_heads", 16),
            value_heads=size(hf_config, "linear_num_value_heads", 32),
            key_dim=size(hf_config, "linear_key_head_dim", 128),
            value_dim=size(hf_config, "linear_value_head_dim", 128),
            kernel=size(hf_config, "linear_conv_kernel_dim", 4),
        )

    def _kinds(self, hf_config: Fields) -> Sequence[str]:
        every = hf_config.integer("full_attention_interval", 1, 1024, default=self.every)
        kinds = [
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(size(hf_config, "num_hidden_layers"))
        ]
        return hf_config.texts("layer_types", default=None) or kinds
