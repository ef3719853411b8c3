"""Kernels of CUDA in the place of plain torch, where they are installed and compute the same: decided here, once for each model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from rlhf_mcore.expected_kernels import computes_delta_gradients
from rlhf_mcore.mcore.core_attention import SDPACoreAttention

if TYPE_CHECKING:
    from rlhf_mcore.mcore.delta_net import DeltaKernels

HALVES = (torch.bfloat16, torch.float16)


def use_fast_kernels(modules: Iterable[torch.nn.Module], config: TransformerConfig) -> None:
    """Give the layers of a model on CUDA the kernels that compute them. With ``deterministic`` they keep torch's, in a fixed order."""
    if config.deterministic_mode:
        for module in modules:
            if isinstance(module, SDPACoreAttention):
                module.in_fixed_order = True
        return
    if config.params_dtype not in HALVES or torch.cuda.get_device_capability()[0] < 8:
        return
    modules, varlen = list(modules), _varlen_attention(config)
    for module in modules:
        if isinstance(module, SDPACoreAttention):
            module.varlen = varlen
    if config.linear_key_head_dim:
        from rlhf_mcore.mcore.delta_net import GatedDeltaNet

        delta = _delta_kernels(config.linear_key_head_dim)
        for module in modules:
            if isinstance(module, GatedDeltaNet):
                module.fla = delta


def _varlen_attention(config: TransformerConfig) -> Any:
    """Return torch's attention over packed sequences; None where it does not compute that of a model.

    It has no sinks, and heads of one size for keys and values, up to 256 elements; of 193 to 224 not on every GPU.
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
    """Attend by torch 2.11, which wants a head of keys and values [N, heads, d] for each of the queries: shared ones are repeated."""
    shared = q.size(1) // k.size(1)
    if options.pop("enable_gqa"):
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return varlen(q, k, v, *borders, **options)


def _delta_kernels(key_dim: int) -> DeltaKernels | None:
    """Return those of flash-linear-attention, 0.4.2 or later; None where it is not installed, or has none for heads of this size."""
    if key_dim > 256 or not computes_delta_gradients():
        return None
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    if any("cu_seqlens_cpu" not in inspect.signature(x).parameters for x in (causal_conv1d, chunk_gated_delta_rule)):
        return None
    from rlhf_mcore.mcore.delta_net import DeltaKernels

    return DeltaKernels(causal_conv1d, chunk_gated_delta_rule)
