"""Select CUDA kernels for a model's layers, and list the kernels that a built model uses.

An installed kernel replaces plain torch code if it computes the same function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import Adam
from megatron.core.transformer import TransformerConfig

from rlhf_mcore.expected_kernels import (
    FLA,
    FUSED_ADAM,
    GROUPS_EXPERTS,
    MAMBA,
    MEGATRON,
    ONE_BY_ONE,
    OURS,
    TE,
    TORCH,
    VARLEN,
    computes_delta_gradients,
)
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.delta_net import DeltaKernels, GatedDeltaNet
from rlhf_mcore.mcore.layers import RMSNorm
from rlhf_mcore.mcore.mixture import GroupedExperts, group_experts, routers
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.state_space import SpaceKernels, StateSpace
from rlhf_mcore.mcore.weights import unwrap

HALVES = (torch.bfloat16, torch.float16)


def use_fast_kernels(modules: Iterable[torch.nn.Module], config: TransformerConfig) -> None:
    """Set fast kernels on the layers of a CUDA model.

    In ``deterministic`` mode, the layers use torch in a fixed order.
    """
    if config.deterministic_mode:
        for module in modules:
            if isinstance(module, SDPACoreAttention):
                module.in_fixed_order = True
        return
    capability = torch.cuda.get_device_capability()
    if config.params_dtype not in HALVES or capability[0] < 8:
        return
    modules = list(modules)
    for module in modules:
        if isinstance(module, SDPACoreAttention):
            module.varlen = _varlen_attention(module.config)
    if config.linear_key_head_dim:
        delta = _delta_kernels(config.linear_key_head_dim)
        for module in modules:
            if isinstance(module, GatedDeltaNet):
                module.fla = delta
    if config.mamba_num_heads:
        space = _space_kernels()
        for module in modules:
            if isinstance(module, StateSpace):
                module.kernels = space
    if config.num_moe_experts and config.params_dtype is torch.bfloat16 and capability == GROUPS_EXPERTS:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        for module in modules:
            if isinstance(module, MoELayer):
                group_experts(module)


def _varlen_attention(config: TransformerConfig) -> Any:
    """Return torch's attention over packed sequences, or None if it does not support a layer's attention.

    It supports no sinks. Keys and values must have the same head size, at most 256. Not every GPU supports sizes 193
    to 224.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    size = config.kv_channels or 0
    fits = size % 8 == 0 and (size <= 192 or 224 < size <= 256)
    if not fits or config.multi_latent_attention or config.softmax_type != "vanilla":
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= parameters.keys() or not torch.backends.cuda.is_flash_attention_available():
        return None
    return varlen_attn if "enable_gqa" in parameters else partial(_varlen_with_all_heads, varlen_attn)


def _varlen_with_all_heads(varlen: Callable[..., Any], q: Any, k: Any, v: Any, *borders: Any, **options: Any) -> Any:
    """Attend with torch 2.11, which needs one key and value head [N, heads, d] per query head.

    Repeat shared heads.
    """
    shared = q.size(1) // k.size(1)
    if options.pop("enable_gqa"):
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return varlen(q, k, v, *borders, **options)


def _delta_kernels(key_dim: int) -> DeltaKernels | None:
    """Return the kernels of flash-linear-attention 0.4.2 or later.

    Return None if it is not installed or does not support heads of this size.
    """
    if key_dim > 256 or not computes_delta_gradients():
        return None
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    if any("cu_seqlens_cpu" not in inspect.signature(x).parameters for x in (causal_conv1d, chunk_gated_delta_rule)):
        return None
    return DeltaKernels(causal_conv1d, chunk_gated_delta_rule)


def _space_kernels() -> SpaceKernels | None:
    """Return the kernels of mamba-ssm 2 and causal-conv1d 1.4 or later, or None if they are not installed."""
    try:
        from causal_conv1d import causal_conv1d_fn
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    if any("seq_idx" not in inspect.signature(x).parameters for x in (causal_conv1d_fn, mamba_chunk_scan_combined)):
        return None
    return SpaceKernels(causal_conv1d_fn, mamba_chunk_scan_combined)


Kind = TypeVar("Kind")
ADAM = Adam.__module__  # module of the Adam class that Megatron imported


def live_kernels(model: MegatronModel) -> dict[str, str]:
    """Return the kernel name of each part, as found in the model's modules and in the config that its code reads."""
    config, chunk = model.config, unwrap(model.chunks[0])
    fused_rope = config.apply_rope_fusion or config.fused_single_qkv_rope
    cores = (
        m for name, m in chunk.named_modules() if isinstance(m, SDPACoreAttention) and not name.endswith("of_trees")
    )
    local = next(cores, None)
    by_torch = f"{TORCH} {'SDPA' if local is None or local.varlen is None else VARLEN}"
    kernels = {
        "attention": by_torch if local is not None else f"{TE} ({config.attention_backend.name})",
        "norm": OURS if _first(chunk, RMSNorm) is not None else TE,
        "rope": f"{TE}, fused" if fused_rope else MEGATRON,
        "gradient accumulation": "fused" if config.gradient_accumulation_fusion else TORCH,
        "cross entropy": OURS if model.spec.geometry.head == "lm" else "none",
    }
    if config.fp8:
        kernels["products"] = f"{TE}, {config.fp8} ({config.fp8_recipe})"
    if config.linear_attention_freq and (delta := _first(chunk, GatedDeltaNet)) is not None:
        kernels["gated delta nets"] = TORCH if delta.fla is None else FLA
    if config.mamba_num_heads and (space := _first(chunk, StateSpace)) is not None:
        kernels["state spaces"] = TORCH if space.kernels is None else MAMBA
    if config.num_moe_experts:
        kind = config.moe_token_dispatcher_type
        backend = "" if kind != "flex" else f" ({config.moe_flex_dispatcher_backend})"
        experts = ONE_BY_ONE
        if config.moe_grouped_gemm and next(routers(model.chunks), None) is not None:
            experts = f"{TE}, grouped"
        elif _first(chunk, GroupedExperts) is not None:
            experts = f"{TORCH}, grouped"
        kernels |= {"experts": experts, "dispatcher": f"{kind}{backend}"}
    if model.optimizer is not None:
        kernels["AdamW"] = FUSED_ADAM.get(ADAM.partition(".")[0], TORCH)
    return kernels


def _first(chunk: GPTModel, kind: type[Kind]) -> Kind | None:
    return next((module for module in chunk.modules() if isinstance(module, kind)), None)
