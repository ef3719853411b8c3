"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): Megatron's layer with correct gradients."""

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

from rlhf_mcore.parallel.context import SummedGradient
from rlhf_mcore.platform.megatron_versions import LayersOfSpec

# Epsilon for the norms of latents, even if the model's other norms use another one. The authors' code and
# transformers do this too.
NORM_EPS = 1e-6
if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron assumes that Transformer Engine is installed, because Megatron can import its own module of the same
    # name.
    multi_latent_attention.HAVE_TE = False


class WholeLinear(torch.nn.Module):
    """A projection without bias that every tensor-parallel rank stores whole.

    Transformer Engine calls this mode "duplicated". Under sequence parallelism a rank processes a part of the tokens.
    The gradient of the weight is therefore summed over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, inputs: int, outputs: int):
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map [..., inputs] to [..., outputs]. Also return None instead of a bias."""
        return F.linear(x, self.weight), None


class LatentAttention(LayersOfSpec, MLASelfAttention):
    """Megatron's layer, with whole projections to latents on every rank and the full gradient of the rotated keys.

    Megatron's own local spec splits these projections and gathers their outputs. The Hugging Face tensors are never
    split in this way.

    All heads share the rotated part of the keys, and a rank computes some of the heads. The gradient of a rank is
    therefore one term of a sum over ranks. With sequence parallelism, Megatron gathers that part of the keys over
    tokens, and the backward pass computes the sum. Without sequence parallelism Megatron does not sum, so this layer
    does.
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
            if hasattr(layer, "eps"):  # a norm, or a linear layer with a built-in norm
                layer.eps = NORM_EPS
        if self.pg_collection.tp.size() > 1 and not config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(self._sum_key_gradient)

    def _sum_key_gradient(self, module: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, None]) -> tuple:
        rope = self.config.qk_pos_emb_head_dim
        latent, rotated = outputs[0].split([outputs[0].size(-1) - rope, rope], dim=-1)
        return torch.cat([latent, SummedGradient.apply(rotated, self.pg_collection.tp)], dim=-1), outputs[1]


def local_attention_spec(norm: type[torch.nn.Module], core_attention: type[torch.nn.Module]) -> ModuleSpec:
    """Return a layer spec of latent attention with Megatron's own linear layers."""
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
