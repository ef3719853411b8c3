"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): Megatron's, with what it needs to learn rightly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor

from rlhf_mcore.mcore.groups import SummedGradient
from rlhf_mcore.platform.megatron_versions import LayersOfSpec

# Of the norms of latents, whatever the model's other norms have: as in the authors' code and in transformers.
NORM_EPS = 1e-6
if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron takes Transformer Engine for installed there where only its own module of that name is.
    multi_latent_attention.HAVE_TE = False


class WholeLinear(torch.nn.Module):
    """A projection without bias, whole on every tensor-parallel rank, as Transformer Engine's "duplicated" one.

    Under sequence parallelism a rank sees a part of the tokens, so its weight's gradient is summed over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, inputs: int, outputs: int):
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and None where a bias would be returned."""
        return F.linear(x, self.weight), None


class LatentAttention(LayersOfSpec, MLASelfAttention):
    """Megatron's layer with whole projections to latents on every rank, and with the full gradient of its rotated keys.

    Megatron's own local spec splits these projections and gathers what they return, as Hugging Face tensors never are. All heads share
    the rotated part of the keys, and a rank has some of the heads: its gradient is a part of the sum over ranks. With sequence
    parallelism Megatron gathers that part of the keys over tokens, and its backward pass sums. Without, nothing does.
    """

    def __init__(self, config: TransformerConfig, submodules: MLASelfAttentionSubmodules, *args: Any, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)
        if submodules.linear_kv_down_proj is LocalSpecProvider().column_parallel_linear():
            hidden, rope = config.hidden_size, config.qk_pos_emb_head_dim
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = WholeLinear(config, self.pg_collection.tp, hidden, config.q_lora_rank)
            self.linear_kv_down_proj = WholeLinear(config, self.pg_collection.tp, hidden, config.kv_lora_rank + rope)
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            layer: Any = getattr(self, name, None)
            if hasattr(layer, "eps"):  # a norm, or a linear layer with one in front
                layer.eps = NORM_EPS
        if self.pg_collection.tp.size() > 1 and not config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(self._sum_key_gradient)

    def _sum_key_gradient(self, module: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, None]) -> tuple:
        rope = self.config.qk_pos_emb_head_dim
        latent, rotated = outputs[0].split([outputs[0].size(-1) - rope, rope], dim=-1)
        return torch.cat([latent, SummedGradient.apply(rotated, self.pg_collection.tp)], dim=-1), outputs[1]


def local_attention_spec(norm: type[torch.nn.Module], core_attention: type[torch.nn.Module]) -> ModuleSpec:
    """Return a specification of latent attention with Megatron's own linear layers."""
    backend = LocalSpecProvider()
    column = backend.column_parallel_linear()
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=column,
            linear_q_up_proj=column,
            linear_kv_down_proj=column,
            linear_kv_up_proj=column,
            core_attention=core_attention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
