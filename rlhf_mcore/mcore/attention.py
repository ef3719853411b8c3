"""Extend Megatron's attention layer by parts that each add one feature, and set the rotary frequencies of layers.

A part overrides methods of the layer. It calls the next class with ``super()``, which can be another part.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.mcore.norms import ProjectionNorm
from rlhf_mcore.mcore.weights import transformer_layers


class Rotary(RotaryEmbedding):
    """Rotary embeddings with given frequencies.

    For type yarn, Megatron also needs the factor of sines and cosines.
    """

    def __init__(self, like: RotaryEmbedding, inv_freq: Tensor, scale: float | None = None):
        super().__init__(2 * len(inv_freq), 1.0, use_cpu_initialization=True, cp_group=like.cp_group)
        self.inv_freq = inv_freq.to(like.inv_freq.device)
        self._scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = super().forward(*args, **kwargs)
        return angles if self._scale is None else (angles, self._scale)


def set_window_frequencies(chunk: GPTModel, inv_freq: Tensor) -> None:
    """Set separate rotary frequencies [rotated elements / 2] for a chunk's windowed layers."""
    rotation = Rotary(chunk.rotary_pos_emb, inv_freq)
    windows = chunk.config.window_size, chunk.config.window_attn_skip_freq
    for layer in chunk.decoder.layers:
        if is_layer_window_attention(*windows, layer.layer_number):
            layer.self_attention.rotation = rotation


def set_latent_frequencies(chunk: GPTModel, inv_freq: Tensor, scale: float) -> None:
    """Set the frequencies [rope_dim / 2] of all layers of a chunk. Latent attention layers rotate by themselves."""
    factor = scale if chunk.config.rope_type == "yarn" else None
    for layer in transformer_layers(chunk):
        attention = layer.self_attention
        attention.rotary_pos_emb = Rotary(attention.rotary_pos_emb, inv_freq, factor)


class OwnRotation(SelfAttention):
    """Rotate queries and keys of some layers by layer-specific frequencies."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rotation: Rotary | None = None  # None: the model's frequencies

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> tuple:
        if self.rotation is not None and rotary_pos_emb is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            parts = 1 if is_packed else self.pg_collection.cp.size()
            rotary_pos_emb = self.rotation(len(rotary_pos_emb) * parts, packed_seq=is_packed)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class OutputGate(SelfAttention):
    """Multiply the output by gates.

    If a rank computes only some heads of a group, Megatron returns the gates of the whole group.
    """

    def get_query_key_value_tensors(self, *args: Any, output_gate: bool = False, **kwargs: Any) -> Any:
        *qkv, gate = super().get_query_key_value_tensors(*args, output_gate=True, **kwargs)
        num_heads, rank = qkv[0].size(2), self.pg_collection.tp.rank()
        parts = gate.split(num_heads, dim=2)
        return (*qkv, parts[rank % len(parts)])


class ProjectionNorms(SelfAttention):
    """Normalise whole query and key projections. Build the layer without norms of heads."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        tp = self.pg_collection.tp
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads, tp)
        self.k_layernorm = ProjectionNorm(config, config.num_query_groups, tp)


def add_parts(attention: ModuleSpec, *, windows: bool, gates: bool, projection_norms: bool) -> None:
    """Add parts to the layer spec of Megatron's attention."""
    parts_by_presence = {OwnRotation: windows, OutputGate: gates, ProjectionNorms: projection_norms}
    if parts := tuple(part for part, is_wanted in parts_by_presence.items() if is_wanted):
        assert attention.module is SelfAttention, f"{attention.module.__name__} takes no parts"
        attention.module = _compose(parts)
    if projection_norms:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = IdentityOp


@cache
def _compose(parts: tuple[type[SelfAttention], ...]) -> type[SelfAttention]:
    """Return a layer class with all of these parts."""
    return type("And".join(part.__name__ for part in parts), parts, {})
