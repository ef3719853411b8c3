"""Read from config.json which layers use sliding-window attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.families.sizes import MAX_SIZES, size
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.geometry import WindowSizes


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding-window attention: some layers attend only to the last ``sliding_window`` tokens.

    ``every``: without ``layer_types`` in config.json, every N-th layer attends to all tokens. ``is_fixed``: other
    layer orders are not supported, because engines do not read them. ``rotates_all``: False if queries and keys
    rotate in layers with windows only. A model without windows rotates them in all layers.
    """

    every: int
    is_fixed: bool = False
    rotates_all: bool = True

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        layers = tuple(layer for layer, kind in enumerate(self._kinds(hf_config)) if kind == "sliding_attention")
        return {"window": WindowSizes(self._tokens(hf_config), layers) if layers else None}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return settings of Megatron's attention."""
        slides = [int(kind == "sliding_attention") for kind in self._kinds(hf_config)]
        if not any(slides):
            return {}
        # A token attends to itself and the ``sliding_window - 1`` tokens before it.
        settings = {"window_size": (self._tokens(hf_config) - 1, 0), "window_attn_skip_freq": slides}
        return settings if self.rotates_all else settings | {"no_rope_freq": [1 - windowed for windowed in slides]}

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        has_windows = bool(self.settings(hf_config))
        kinds, num_layers = self._kinds(hf_config), size(hf_config, "num_hidden_layers")
        if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
            yield f"layer_types has {shorten(unknown[0])!r}, which is not supported; use another model"
        if len(kinds) != num_layers:
            yield f"layer_types has {len(kinds)} layers, num_hidden_layers is {num_layers}; export the model again"
        elif self.is_fixed and list(kinds) != self._usual_kinds(hf_config):
            yield f"layer_types is supported with full_attention in every layer of {self.every} only; use another model"
        # transformers would rotate in no layer, and vLLM in all.
        if not (self.rotates_all or has_windows) and hf_config.content.get("sliding_window", 1) is not None:
            yield 'layer_types has no sliding_attention, but sliding_window is not null; add "sliding_window": null'

    @staticmethod
    def _tokens(hf_config: Fields) -> int:
        return hf_config.integer("sliding_window", 1, MAX_SIZES["max_position_embeddings"])

    def _kinds(self, hf_config: Fields) -> Sequence[str]:
        kinds = hf_config.texts("layer_types", default=None)
        return self._usual_kinds(hf_config) if kinds is None else kinds

    def _usual_kinds(self, hf_config: Fields) -> list[str]:
        every = hf_config.integer("sliding_window_pattern", 1, 1024, default=self.every)
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(size(hf_config, "num_hidden_layers"))
        ]
