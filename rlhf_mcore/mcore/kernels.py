"""Name the implementation of each hot part that a built model runs with."""

from __future__ import annotations

from typing import TypeVar

from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import Adam

from rlhf_mcore.expected_kernels import FLA, FUSED_ADAM, MEGATRON, OURS, TE, TORCH, VARLEN
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.norms import RMSNorm
from rlhf_mcore.mcore.weights import unwrap

Kind = TypeVar("Kind")
ADAM = Adam.__module__  # of the class that Megatron has found


def live_kernels(model: MegatronModel) -> dict[str, str]:
    """Name the kernels of a model by part, as found in the model itself and in the config that its code branches on."""
    config, chunk = model.config, unwrap(model.chunks[0])
    fused_rope = config.apply_rope_fusion or config.fused_single_qkv_rope
    local = _first(chunk, SDPACoreAttention)
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
    if config.linear_attention_freq:
        from rlhf_mcore.mcore.delta_net import GatedDeltaNet

        if (delta := _first(chunk, GatedDeltaNet)) is not None:
            kernels["gated delta nets"] = TORCH if delta.fla is None else FLA
    if config.num_moe_experts:
        from rlhf_mcore.mcore.mixture import routers

        kind = config.moe_token_dispatcher_type
        backend = "" if kind != "flex" else f" ({config.moe_flex_dispatcher_backend})"
        grouped = config.moe_grouped_gemm and next(routers(model.chunks), None) is not None
        kernels |= {"experts": f"{TE}, grouped" if grouped else "one after the other", "dispatcher": f"{kind}{backend}"}
    if model.optimizer is not None:
        kernels["AdamW"] = FUSED_ADAM.get(ADAM.partition(".")[0], TORCH)
    return kernels


def _first(chunk: GPTModel, kind: type[Kind]) -> Kind | None:
    return next((module for module in chunk.modules() if isinstance(module, kind)), None)
