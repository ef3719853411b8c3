"""Attention layers and rotary frequencies that Megatron lacks.

Parts extend Megatron's attention layer, each by one feature. A part overrides methods of the layer. It calls the next
class with ``super()``, which can be another part. Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434) is
Megatron's layer with correct gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.expected_kernels import MAX_FLASH_SIZE
from rlhf_mcore.geometry import WideSizes
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.groups import Sum
from rlhf_mcore.mcore.weights import transformer_layers
from rlhf_mcore.mcore.wide_attention import NormedValues, WideHeads
from rlhf_mcore.parallel.context import SummedGradient
from rlhf_mcore.platform.megatron_versions import LayersOfSpec, drop_rotary_factor

# Epsilon for the norms of latents, even if the model's other norms use another one. The authors' code and
# transformers do this too.
LATENT_NORM_EPS = 1e-6
if not isinstance(multi_latent_attention.TELinear, type):
    # Megatron assumes that Transformer Engine is installed, because Megatron can import its own module of the same
    # name.
    multi_latent_attention.HAVE_TE = False


class Rotary(RotaryEmbedding):
    """Rotary embeddings with given frequencies.

    For type yarn, Megatron also needs the factor of sines and cosines.
    """

    def __init__(self, like: RotaryEmbedding, inv_freq: Tensor, scale: float | None = None):
        super().__init__(2 * len(inv_freq), 1.0, use_cpu_initialization=True, cp_group=like.cp_group)
        self.inv_freq = inv_freq.to(like.inv_freq.device)
        self.scale = scale

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = super().forward(*args, **kwargs)
        return angles if self.scale is None else (angles, self.scale)


def set_window_frequencies(chunk: GPTModel, inv_freq: Tensor) -> None:
    """Set separate rotary frequencies [rotated elements / 2], without a factor, for a chunk's windowed layers."""
    rotation = Rotary(chunk.rotary_pos_emb, inv_freq)
    windows = chunk.config.window_size, chunk.config.window_attn_skip_freq
    for layer in chunk.decoder.layers:
        if is_layer_window_attention(*windows, layer.layer_number):
            layer.self_attention.rotation = rotation
            drop_rotary_factor(layer.self_attention)


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


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of a projection together. Input on a tensor-parallel rank: [..., its heads, head_dim].

    Every rank stores the whole weight [num_heads * head_dim]. Megatron recognises the module's name and sums the
    gradient over ranks. If there are fewer heads than ranks, several ranks hold the same head.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, group: dist.ProcessGroup):
        super().__init__()
        assert config.kv_channels is not None and config.qk_layernorm
        self.eps, self.num_heads, self._group = config.layernorm_epsilon, num_heads, group
        self.weight = torch.nn.Parameter(torch.ones(num_heads * config.kv_channels, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide, num_local, ranks = x.float(), x.size(-2), self._group.size()
        squares = wide.pow(2).sum((-2, -1), keepdim=True)
        if ranks > 1:  # correct for heads that several ranks count
            squares = Sum.apply(squares, self._group) * (self.num_heads / (num_local * ranks))
        normed = wide * torch.rsqrt(squares / self.weight.numel() + self.eps)
        first = self._group.rank() * self.num_heads // ranks
        return self.weight.view(self.num_heads, -1)[first : first + num_local] * normed.to(x.dtype)


class ProjectionNorms(SelfAttention):
    """Normalise whole query and key projections. Build the layer without norms of heads."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        tp = self.pg_collection.tp
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads, tp)
        self.k_layernorm = ProjectionNorm(config, config.num_query_groups, tp)


def add_parts(
    attention: ModuleSpec,
    *,
    windows: bool = False,
    gates: bool = False,
    projection_norms: bool = False,
    value_norms: bool = False,
) -> None:
    """Add parts to the layer spec of Megatron's attention."""
    parts_by_presence = {
        OwnRotation: windows,
        OutputGate: gates,
        ProjectionNorms: projection_norms,
        NormedValues: value_norms,
    }
    if parts := tuple(part for part, is_wanted in parts_by_presence.items() if is_wanted):
        assert attention.module is SelfAttention, f"{attention.module.__name__} takes no parts"
        attention.module = _compose(parts)
    if projection_norms:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = IdentityOp


def use_wide_heads(attention: ModuleSpec, wide: WideSizes) -> None:
    """Change the heads in the layer spec of attention, which may have parts.

    Transformer Engine has no kernel for packed sequences with larger heads than flash attention's.
    """
    if wide.heads.head_dim > MAX_FLASH_SIZE:
        attention.submodules.core_attention = SDPACoreAttention
    attention.module, attention.params = _compose((attention.module, WideHeads)), {**attention.params, "wide": wide}


@cache
def _compose(parts: tuple[type[SelfAttention], ...]) -> type[SelfAttention]:
    """Return a layer class with all of these parts."""
    return type("And".join(part.__name__ for part in parts), parts, {})


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
                layer.eps = LATENT_NORM_EPS
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
