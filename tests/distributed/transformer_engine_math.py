"""Compute the forward passes of Transformer Engine's layers, which need a GPU, with torch operations.

Transformer Engine's Python code (2.17) constructs the layers, and Megatron wraps them. The stand-ins return the same tensors in the
same order and communicate like that code: gathers and scatters within layers that ranks split, and none if ``parallel_mode`` is None.
The attention is this project's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def use_torch() -> None:
    """Let Transformer Engine's layers compute on the host. Call it after importing Transformer Engine and before Megatron."""
    import transformer_engine.pytorch as te

    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]  # Megatron then uses torch's optimizers
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    from rlhf_mcore.mcore.core_attention import SDPACoreAttention

    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _norm_and_linear
    te.GroupedLinear.forward = _multiply_grouped
    te.RMSNorm.forward = lambda self, x: _normalize(x, self.weight, self)
    TESpecProvider.core_attention = lambda self: SDPACoreAttention


def _normalize(x: Tensor, weight: Tensor, layer: Any) -> Tensor:
    gamma = weight + 1 if layer.zero_centered_gamma else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.eps) * gamma


def _product(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the product and the bias. The product includes the bias, unless the layer returns the bias separately."""
    from megatron.core import tensor_parallel as tp

    mode, group = layer.parallel_mode if layer.tp_size > 1 else None, layer.tp_group
    if mode == "column" and layer.sequence_parallel:
        x = tp.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    elif mode == "column":
        x = tp.copy_to_tensor_model_parallel_region(x, group=group)
    y, bias = F.linear(x, layer.weight), layer.bias if layer.use_bias else None
    if mode == "row" and layer.sequence_parallel:
        y = tp.reduce_scatter_to_sequence_parallel_region(y, group=group)
    elif mode == "row":
        y = tp.reduce_from_tensor_model_parallel_region(y, group=group)
    return (y if bias is None or layer.return_bias else y + bias), bias


def _linear(self: Any, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
    y, bias = _product(self, inp)
    return (y, bias) if self.return_bias else y


def _norm_and_linear(self: Any, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
    normed = _normalize(inp, self.layer_norm_weight, self)
    y, bias = _product(self, normed)
    returned = (y, *((bias,) if self.return_bias else ()), *((normed,) if self.return_layernorm_output else ()))
    return returned if len(returned) > 1 else y


def _multiply_grouped(self: Any, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
    assert not self.use_bias
    parts = inp.split([int(count) for count in m_splits])
    return torch.cat([F.linear(part, getattr(self, f"weight{k}")) for k, part in enumerate(parts)])
