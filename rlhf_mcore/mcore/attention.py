"""Attention around its core: what families have beside Megatron's."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.mcore.latent import Rotary
from rlhf_mcore.mcore.norms import ProjectionNorm


class Attention(SelfAttention):
    """Megatron's, whose rotation may be another one in some layers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rotation: Rotary | None = None  # that of the model

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> tuple:
        if self.rotation is not None and rotary_pos_emb is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            parts = 1 if is_packed else self.pg_collection.cp.size()
            rotary_pos_emb = self.rotation(len(rotary_pos_emb) * parts, packed_seq=is_packed)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class GatedAttention(SelfAttention):
    """Megatron's, whose output is multiplied with gates: where a rank has some heads of a group, it gets the gates of all."""

    def get_query_key_value_tensors(self, *args: Any, output_gate: bool = False, **kwargs: Any) -> Any:
        *qkv, gate = super().get_query_key_value_tensors(*args, output_gate=True, **kwargs)
        held, rank = qkv[0].size(2), self.pg_collection.tp.rank()
        parts = gate.split(held, dim=2)
        return (*qkv, parts[rank % len(parts)])


class ProjectionNormAttention(Attention):
    """With norms of the whole projections to queries and to keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads, self.pg_collection.tp)
        self.k_layernorm = ProjectionNorm(config, config.num_query_groups, self.pg_collection.tp)


def set_window_frequencies(chunk: GPTModel, inv_freq: Tensor | None) -> None:
    """Give the layers of a chunk that have a window rotary frequencies [head_dim / 2] of their own; None: they have the model's."""
    rotation = None if inv_freq is None else Rotary(chunk.rotary_pos_emb, inv_freq)
    for layer in chunk.decoder.layers:
        windows = chunk.config.window_size, chunk.config.window_attn_skip_freq
        if rotation is not None and is_layer_window_attention(*windows, layer.layer_number):
            layer.self_attention.rotation = rotation
