"""Build layer specs: Transformer Engine's modules if it is installed, else a local spec that also runs on a CPU.

The local spec uses Megatron's linear layers and replaces two parts. torch's norm does not support sequence
parallelism. Megatron's core attention does not support packed input. MoE layers use our router under both specs.
"""

from __future__ import annotations

from typing import Any

import torch
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
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from rlhf_mcore.families.base import Family
from rlhf_mcore.mcore.attention import add_parts
from rlhf_mcore.mcore.core_attention import SDPACoreAttention, with_trees
from rlhf_mcore.mcore.delta_net import delta_net_spec
from rlhf_mcore.mcore.latent import LatentAttention, local_attention_spec
from rlhf_mcore.mcore.mixture import use_mixture
from rlhf_mcore.mcore.norms import NormedAdd, RMSNorm
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
    config: TransformerConfig, kind: str, family: Family, *, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Build the spec of the layers in one model chunk; ``kind`` is "te", "local" or "auto"."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
    kinds = [(_is_moe(config, number), _is_delta(config, number)) for number in numbers]
    specs = {(moe, delta): layer_spec(config, kind, family, moe=moe, delta=delta) for moe, delta in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[k] for k in kinds], layer_norm=norm_and_linear(kind)[0])


def layer_spec(config: TransformerConfig, kind: str, family: Family, *, moe: bool, delta: bool = False) -> ModuleSpec:
    """Build the spec of one layer.

    ``moe``: with experts; ``delta``: with a gated delta net instead of attention.
    """
    te = use_te(kind)
    spec = (_te_spec if te else _local_spec)(config, family, moe=moe)
    layer = spec.submodules
    if delta:
        _use_delta_net(layer, te)
    else:
        _add_parts(layer.self_attention, config, family)
    if moe:
        use_mixture(layer.mlp, family)
    _place_norms(layer, config, family)
    return spec


def norm_and_linear(kind: str) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    """Return the classes of a standalone norm and of a linear layer with split outputs."""
    if not use_te(kind):
        return RMSNorm, LocalSpecProvider().column_parallel_linear()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    return TENorm, TEColumnParallelLinear


def _add_parts(attention: ModuleSpec, config: TransformerConfig, family: Family) -> None:
    """Add the parts that a family's attention needs in addition to Megatron's."""
    parts = {
        "windows": family.windows is not None,
        "gates": config.attention_output_gate,
        "projection_norms": family.norm_of_projections,
    }
    if any(parts.values()):
        add_parts(attention, **parts)


def _use_delta_net(layer: TransformerLayerSubmodules, te: bool) -> None:
    backend: Any = LocalSpecProvider()
    if te:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        layer.input_layernorm, backend = TENorm, TESpecProvider()
    layer.self_attention = delta_net_spec(backend.column_parallel_linear(), backend.row_parallel_linear())


def _place_norms(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family) -> None:
    """Normalise the outputs of attention and MLP if the family does, instead of or in addition to their inputs."""
    if family.norms == "outputs":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if family.norms != "inputs":
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(NormedAdd, {"config": config})


def _is_moe(config: TransformerConfig, layer: int) -> bool:
    frequency = config.moe_layer_freq
    return config.num_moe_experts is not None and (isinstance(frequency, int) or bool(frequency[layer]))


def _is_delta(config: TransformerConfig, layer: int) -> bool:
    return isinstance(config.linear_attention_freq, list) and bool(config.linear_attention_freq[layer])


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
