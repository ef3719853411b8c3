"""Rotary frequencies of the Hugging Face model, which its layers rotate queries and keys by."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.mcore.weights import transformer_layers


class Rotary(RotaryEmbedding):
    """Rotary embeddings of given frequencies; of the kind yarn Megatron asks for the factor of sines and cosines too."""

    def __init__(self, like: RotaryEmbedding, inv_freq: Tensor, scale: float | None = None):
        super().__init__(2 * len(inv_freq), 1.0, use_cpu_initialization=True, cp_group=like.cp_group)
        self.inv_freq = inv_freq.to(like.inv_freq.device)
        self._scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = super().forward(*args, **kwargs)
        return angles if self._scale is None else (angles, self._scale)


def set_window_frequencies(chunk: GPTModel, inv_freq: Tensor) -> None:
    """Give the layers of a chunk that have a window rotary frequencies [rotated elements / 2] of their own."""
    rotation = Rotary(chunk.rotary_pos_emb, inv_freq)
    windows = chunk.config.window_size, chunk.config.window_attn_skip_freq
    for layer in chunk.decoder.layers:
        if is_layer_window_attention(*windows, layer.layer_number):
            layer.self_attention.rotation = rotation


def set_latent_frequencies(chunk: GPTModel, inv_freq: Tensor, scale: float) -> None:
    """Give all layers of a chunk, which rotate by themselves, the frequencies [rope_dim / 2]."""
    factor = scale if chunk.config.rope_type == "yarn" else None
    for layer in transformer_layers(chunk):
        attention = layer.self_attention
        attention.rotary_pos_emb = Rotary(attention.rotary_pos_emb, inv_freq, factor)
