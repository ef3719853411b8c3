"""Name the implementation of each hot part that is to be expected here, in one line, without importing any of it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

TE, TORCH, OURS, MEGATRON = "Transformer Engine", "torch", "rlhf_mcore", "Megatron"
FLA = "flash-linear-attention"
VARLEN = "varlen (packed), SDPA (padded)"  # of one kernel for all packed sequences
APEX = "fused_weight_gradient_mlp_cuda"  # of apex, which adds gradients of weights to fp32 buffers
FUSED_ADAM = {"transformer_engine": TE, "amp_C": "apex", "apex": "apex"}


def kernels_text(parts: Mapping[str, str]) -> str:
    """Write parts and their implementations on one line."""
    return "kernels: " + ", ".join(f"{part} {kernel}" for part, kernel in parts.items())


def expected_kernels(has_gpu: bool) -> dict[str, str]:
    """Name the kernels of a run with default settings on this machine."""
    has_te = find_spec("transformer_engine") is not None
    fused = [name for module, name in FUSED_ADAM.items() if find_spec(module) is not None]
    delta = FLA if has_gpu and find_spec("fla") is not None and computes_delta_gradients() else TORCH
    return {
        "attention": TE if has_te else f"{TORCH} {VARLEN if has_gpu else 'SDPA'}",
        "norm": TE if has_te else OURS,
        "rope": f"{TE}, fused" if has_te and has_gpu else MEGATRON,
        "gradient accumulation": "fused" if has_te and has_gpu and find_spec(APEX) is not None else TORCH,
        "cross entropy": OURS,
        **({"gated delta nets": delta} if has_gpu else {}),
        "experts": f"{TE}, grouped" if has_te else "one after the other",
        "dispatcher": "alltoall",
        "AdamW": fused[0] if fused and has_gpu else TORCH,
    }


def computes_delta_gradients() -> bool:
    """Return whether Triton compiles the backward pass of flash-linear-attention's recurrence rightly for this GPU.

    From 3.4 to 3.7.0 it does not on Hopper (flash-linear-attention's issue 640). Releases from 0.6 on refuse it, and take tilelang's
    kernels where that is installed; earlier ones return wrong gradients.
    """
    try:
        import torch
    except (ImportError, OSError):  # doctor says so
        return True
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not is_hopper or find_spec("tilelang") is not None:
        return True
    return find_spec("triton") is None or not Version("3.4.0") <= Version(version("triton")) < Version("3.7.1")
