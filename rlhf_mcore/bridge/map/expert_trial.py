"""Try out whether the kernel of a layer of experts reads its live parameters."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def experts_are_read(layer: Any) -> bool:
    """Write the first local expert as its loader would, and compare the kernel with the formula of a gated MLP."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

    method = layer.quant_method
    if method.is_monolithic or layer.activation != MoEActivation.SILU or method.moe_kernel is None:
        return False
    if method.moe_kernel.fused_experts.activation_format() != FusedMoEActivationFormat.Standard:
        return False  # its tokens come sorted by expert, from other ranks
    w13, w2 = layer.w13_weight.data[0], layer.w2_weight.data[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, w13.shape[1], generator=generator).to(w13)
    before = w13.clone(), w2.clone()
    for weight in (w13, w2):
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    gate, up = (hidden @ w13.t()).float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(w2) @ w2.t()
    slot = 0 if layer.expert_map is None else int((layer.expert_map == 0).nonzero()[0])
    chosen = torch.full((1, 1), slot, dtype=torch.int32, device=w13.device)
    kernel = method.moe_kernel.impl
    usual, kernel.prepare_finalize = kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular()  # no other ranks
    try:
        result = method.apply(layer, hidden, torch.ones_like(chosen, dtype=torch.float32), chosen, None, None)
    finally:
        kernel.prepare_finalize = usual
        w13.copy_(before[0])
        w2.copy_(before[1])
    return bool((result - expected).norm() < 0.05 * expected.norm())
