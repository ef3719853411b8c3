"""Predict which kernels a run on this machine uses, without importing their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

from rlhf_mcore.geometry import LatentSizes, ModelGeometry

TE, TORCH, OURS, MEGATRON = "Transformer Engine", "torch", "rlhf_mcore", "Megatron"
FLA = "flash-linear-attention"
MAMBA = "mamba-ssm"
ONE_BY_ONE = "one after the other"  # experts
# Compute capability of the GPUs on which we use torch's grouped matrix multiplication for experts. On Blackwell it returns a gradient
# that is not zero for an expert without tokens (pytorch issue 172439).
GROUPS_EXPERTS = (9, 0)
VARLEN = "varlen (packed), SDPA (padded)"  # varlen: a single kernel for all packed sequences
MAX_FLASH_SIZE = 256  # largest head that flash attention and cuDNN support; larger heads share no keys on a GPU
APEX = "fused_weight_gradient_mlp_cuda"  # module of apex that adds weight gradients to fp32 buffers
FUSED_ADAM = {"transformer_engine": TE, "amp_C": "apex", "apex": "apex"}


def kernels_text(parts: Mapping[str, str]) -> str:
    """Return one line with each part and its kernel."""
    return "kernels: " + ", ".join(f"{part} {kernel}" for part, kernel in parts.items())


def expected_kernels(has_gpu: bool) -> dict[str, str]:
    """Return the kernel of each part for a run with default settings on this machine."""
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
        **({"gated delta nets": delta, "state spaces": MAMBA if has_mamba() else TORCH} if has_gpu else {}),
        "experts": f"{grouped}, grouped" if grouped is not None else ONE_BY_ONE,
        "dispatcher": "alltoall",
        "AdamW": fused[0] if fused and has_gpu else TORCH,
    }


def why_unshared(geometry: ModelGeometry, cp: int, has_gpu: bool) -> str | None:
    """Return the reason why a model cannot compute shared prefixes once, or None if it can. Equal on every rank."""
    if geometry.vision is not None:
        return "the model reads images"
    if geometry.mtp_layers and cp > 1:
        return "MTP layers under context parallelism"
    if isinstance(geometry.attention, LatentSizes) and geometry.attention.indexer is not None:
        return "an indexer selects keys"
    if geometry.delta is not None and has_gpu and find_spec("fla") is not None:
        return f"gated delta nets run by {FLA}"
    if geometry.space is not None and has_gpu and has_mamba():
        return f"state spaces run by {MAMBA}"
    return None


def has_mamba() -> bool:
    """Return whether the kernels of state spaces are installed: mamba-ssm and causal-conv1d."""
    return all(find_spec(package) is not None for package in ("mamba_ssm", "causal_conv1d"))


def computes_delta_gradients() -> bool:
    """Return whether flash-linear-attention's recurrence has a correct backward pass on this GPU.

    On Hopper, Triton 3.4 to 3.7.0 compiles it wrongly (flash-linear-attention's issue 640). flash-linear-attention 0.6 and later
    reject these versions, and use tilelang's kernels if tilelang is installed; earlier releases return wrong gradients.
    """
    if _capability()[0] != 9 or find_spec("tilelang") is not None:
        return True
    return find_spec("triton") is None or not Version("3.4.0") <= Version(version("triton")) < Version("3.7.1")


def _capability() -> tuple[int, int]:
    """Return the compute capability of this machine's GPU; (0, 0) if torch sees none."""
    try:
        import torch
    except (ImportError, OSError):  # doctor reports it
        return 0, 0
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
