"""Build layer specs, with the norms that Megatron lacks.

A spec uses Transformer Engine's modules if it is installed. Otherwise it is a local spec that also runs on a CPU.

The local spec uses Megatron's linear layers and replaces two parts. torch's norm does not support sequence
parallelism. Megatron's core attention does not support packed input. MoE layers use our router under both specs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.base import Family
from rlhf_mcore.geometry import LayerKind, Mixer, ModelGeometry, WideSizes
from rlhf_mcore.mcore.attention import LatentAttention, add_parts, local_attention_spec, use_wide_heads
from rlhf_mcore.mcore.core_attention import SDPACoreAttention, with_trees
from rlhf_mcore.mcore.delta_net import GatedDeltaNet
from rlhf_mcore.mcore.indexed_attention import use_indexed_attention, use_shared_attention
from rlhf_mcore.mcore.mixture import use_mixture
from rlhf_mcore.mcore.state_space import StateSpace
from rlhf_mcore.platform import cpu_kernels
from rlhf_mcore.platform.megatron_versions import submodules_of

try:
    import transformer_engine  # noqa: F401

    HAVE_TE = True
except ImportError:
    HAVE_TE = False


def use_te(kind: str) -> bool:
    """Return whether ``model.layer_spec`` selects Transformer Engine ("auto": if it is installed)."""
    return kind == "te" or (kind == "auto" and HAVE_TE)


def decoder_spec(
    config: TransformerConfig, kind: str, geometry: ModelGeometry, *, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Build the spec of the layers in one model chunk; ``kind`` is "te", "local" or "auto"."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
    kinds = list(map(geometry.layer_kind, numbers))
    family = FAMILIES[geometry.family]
    specs = {layer: layer_spec(config, kind, family, layer, geometry.wide) for layer in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[k] for k in kinds], layer_norm=norm_and_linear(kind)[0])


def layer_spec(
    config: TransformerConfig, kind: str, family: Family, layer: LayerKind, wide: WideSizes | None = None
) -> ModuleSpec:
    """Build the spec of the layers of one kind. ``wide``: sizes of the kind "wide"."""
    (mixer, behind), te = layer, use_te(kind)
    spec = (_te_spec if te else _local_spec)(config, family, moe=behind == "moe")
    parts = spec.submodules
    _MIXERS[mixer](parts, config, family, te)
    if mixer == "wide":
        assert wide is not None
        use_wide_heads(parts.self_attention, wide)
    if behind == "moe":
        use_mixture(parts.mlp, family)
        if family.experts_beside_mlp:
            parts.pre_mlp_layernorm = IdentityOp
    _place_norms(parts, config, family)
    if behind == "none":
        parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
    return spec


def norm_and_linear(kind: str) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    """Return the classes of a standalone norm and of a linear layer with split outputs."""
    if not use_te(kind):
        return RMSNorm, LocalSpecProvider().column_parallel_linear()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    return TENorm, TEColumnParallelLinear


def _add_parts(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool) -> None:
    """Add the parts that a family's attention needs in addition to Megatron's."""
    attention: Any = layer.self_attention
    parts = {
        "windows": family.windows is not None,
        "gates": config.attention_output_gate,
        "projection_norms": family.norm_of_projections,
        "value_norms": family.norm_of_values,
    }
    if any(parts.values()):
        add_parts(attention, **parts)


def _use_recurrence(module: type[torch.nn.Module], layer: TransformerLayerSubmodules, te: bool) -> None:
    """Use a recurrent layer, with column- and row-parallel linear layers, as a layer's "attention"."""
    backend: Any = LocalSpecProvider()
    if te:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        layer.input_layernorm, backend = TENorm, TESpecProvider()
    parts = {"in_proj": backend.column_parallel_linear(), "out_proj": backend.row_parallel_linear()}
    layer.self_attention = ModuleSpec(module, parts)


def _use_delta_net(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool) -> None:
    _use_recurrence(GatedDeltaNet, layer, te)


def _use_state_space(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool) -> None:
    _use_recurrence(StateSpace, layer, te)


def _drop_mixer(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool) -> None:
    layer.input_layernorm, layer.self_attention, layer.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp


_MIXERS: dict[Mixer, Callable[[TransformerLayerSubmodules, TransformerConfig, Family, bool], None]] = {
    "attention": _add_parts,
    "wide": _add_parts,
    "delta": _use_delta_net,
    "state_space": _use_state_space,
    "indexed": use_indexed_attention,
    "shared": use_shared_attention,
    "none": _drop_mixer,
}


def _place_norms(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family) -> None:
    """Normalise the outputs of attention and MLP if the family does, instead of or in addition to their inputs."""
    if family.norms == "outputs":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if family.norms != "inputs":
        layer.self_attn_bda = ModuleSpec(NormedAdd, {"config": config})
        layer.mlp_bda = ModuleSpec(NormedAdd, {"config": config, "scales": family.scales_layers})


def _te_spec(config: TransformerConfig, family: Family, *, moe: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=moe,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = with_trees(attention.submodules.core_attention)
    if config.multi_latent_attention:
        attention.module = LatentAttention
    if family.norms == "outputs":  # the linear layers then contain no norm
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        attention.submodules.linear_qkv = TEColumnParallelLinear
        submodules_of(spec.submodules.mlp).linear_fc1 = TEColumnParallelLinear
    return spec


def _local_spec(config: TransformerConfig, family: Family, *, moe: bool) -> ModuleSpec:
    backend = LocalSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    if moe:  # experts run one after another
        mlp = get_moe_module_spec_for_backend(backend, config.num_moe_experts, moe_grouped_gemm=False)
    else:
        mlp = get_mlp_module_spec_for_backend(backend=backend)
    if config.multi_latent_attention:
        attention = local_attention_spec(RMSNorm, SDPACoreAttention)
    else:
        submodules = SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=SDPACoreAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        )
        attention = ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467) over the last dimension, computed in fp32.

    Under sequence parallelism a rank processes a part of the tokens, so the weight's gradient is summed over
    tensor-parallel ranks. The attribute ``sequence_parallel`` requests this from Megatron. For norms of query and key
    heads, Megatron recognises the module's name instead.

    With Megatron's ``layernorm_zero_centered_gamma`` the norm multiplies by one plus the weight, in fp32 too.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
        super().__init__()
        self.eps, self._zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if cpu_kernels.has_kernel(x) and self.weight.dtype == x.dtype:
            return cpu_kernels.rms_norm(x, 1.0 + self.weight if self._zero_centered else self.weight, self.eps)
        if x.is_cuda and not self._zero_centered:  # one kernel instead of five
            return self.weight * F.rms_norm(x, (x.size(-1),), eps=self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._zero_centered:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class NormedAdd(torch.nn.Module):
    """Normalise the output of attention or of an MLP and add it to the residual, with Megatron's interface.

    ``scales``: multiply the sum by a factor, which files contain and no optimizer updates.
    """

    scale: Tensor | None

    def __init__(self, config: TransformerConfig, scales: bool = False):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=config.params_dtype) if scales else None)
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of ((output, its bias or None), residual, dropout rate)."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            output = self.norm(output if bias is None else output + bias)
            added: Tensor = add((output, None), residual, dropout)
            return added if self.scale is None else added * self.scale

        return normed_add
