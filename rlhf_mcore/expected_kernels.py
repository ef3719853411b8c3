"""Name the implementation of each hot part that is to be expected here, in one line, without importing any of it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from rlhf_mcore.geometry import ModelGeometry

TE, TORCH, OURS, MEGATRON = "Transformer Engine", "torch", "rlhf_mcore", "Megatron"
FLA = "flash-linear-attention"
ONE_BY_ONE = "one after the other"  # experts
# Capability of the GPUs on which torch multiplies the tokens of all experts at once. On Blackwell the gradient of an expert without
# tokens is not zero (pytorch issue 172439).
GROUPS_EXPERTS = (9, 0)
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
    grouped = TE if has_te else TORCH if has_gpu and _capability() == GROUPS_EXPERTS else None
    return {
        "attention": TE if has_te else f"{TORCH} {VARLEN if has_gpu else 'SDPA'}",
        "norm": TE if has_te else OURS,
        "rope": f"{TE}, fused" if has_te and has_gpu else MEGATRON,
        "gradient accumulation": "fused" if has_te and has_gpu and find_spec(APEX) is not None else TORCH,
        "cross entropy": OURS,
        **({"gated delta nets": delta} if has_gpu else {}),
        "experts": f"{grouped}, grouped" if grouped is not None else ONE_BY_ONE,
        "dispatcher": "alltoall",
        "AdamW": fused[0] if fused and has_gpu else TORCH,
    }


def why_unshared(geometry: ModelGeometry, cp: int, has_gpu: bool) -> str | None:
    """Tell why a model cannot compute shared prefixes once; None: it can. The same on every rank."""
    if geometry.vision is not None:
        return "the model reads images"
    if geometry.mtp_layers and cp > 1:
        return "MTP layers under context parallelism"
    if geometry.delta is not None and has_gpu and find_spec("fla") is not None:
        return f"gated delta nets run by {FLA}"
    return None


def computes_delta_gradients() -> bool:
    """Return whether Triton compiles the backward pass of flash-linear-attention's recurrence rightly for this GPU.

    From 3.4 to 3.7.0 it does not on Hopper (flash-linear-attention's issue 640). Releases from 0.6 on refuse it, and take tilelang's
    kernels where that is installed; earlier ones return wrong gradients.
    """
    if _capability()[0] != 9 or find_spec("tilelang") is not None:
        return True
    return find_spec("triton") is None or not Version("3.4.0") <= Version(version("triton")) < Version("3.7.1")


def _capability() -> tuple[int, int]:
    """Return the compute capability of this machine's GPU; (0, 0) if torch sees none."""
    try:
        import torch
    except (ImportError, OSError):  # doctor says so
        return 0, 0
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
