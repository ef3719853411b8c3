"""Attention with other heads in some layers, values without a projection, and norms of values (Gemma 4)."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from torch import Tensor

from rlhf_mcore.geometry import WideSizes


class NormedValues(SelfAttention):
    """Normalise the values of each head, without a weight."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
        value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        return (query, key, value, *gate)


class WideHeads(SelfAttention):
    """Attend with the heads of ``wide``. If keys are values, the projection has no rows for values."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        wide: WideSizes,
        **kwargs: Any,
    ):
        config = copy(config)
        config.kv_channels, config.num_query_groups = wide.heads.head_dim, wide.heads.num_kv_heads
        self._keys_are_values = wide.keys_are_values
        if wide.keys_are_values:
            submodules = replace(submodules, linear_qkv=_without_values(submodules.linear_qkv))
        super().__init__(config, submodules, *args, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return queries [s, b, local heads, d], and keys and values [s, b, local groups, d]."""
        if not self._keys_are_values:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        rows, _ = self.linear_qkv(hidden_states)
        tp, groups = self.pg_collection.tp, self.config.num_query_groups
        sharers = tp.size() // groups  # ranks with the same keys, which split the rows of a group
        if sharers > 1:
            rows = all_gather_last_dim_from_tensor_parallel_region(rows, group=tp)
            rows = rows.chunk(groups, dim=-1)[tp.rank() // sharers]
        heads = rows.unflatten(-1, (self.num_query_groups_per_partition, -1, self.config.kv_channels))
        query, key = heads[..., :-1, :].flatten(-3, -2), heads[..., -1, :]
        if sharers > 1:
            query = query.chunk(sharers, dim=-2)[tp.rank() % sharers]
        return self.q_layernorm(query), self.k_layernorm(key), key


@cache
def _without_values(linear: type) -> type:
    """Derive a projection from a class of linear layers. The projection has rows for queries and keys only."""

    class QueriesAndKeys(linear):
        def __init__(self, inputs: int, outputs: int, *args: Any, config: TransformerConfig, **kwargs: Any):
            assert config.kv_channels is not None and config.num_query_groups is not None
            keys = config.kv_channels * config.num_query_groups
            super().__init__(inputs, outputs - keys, *args, config=config, **kwargs)

    return QueriesAndKeys
