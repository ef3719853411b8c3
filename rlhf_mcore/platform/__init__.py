"""What a device is. Everything above this package is the same code on a CPU and on CUDA."""

from __future__ import annotations

from rlhf_mcore.platform.base import Platform

__all__ = ["Platform", "current_platform"]


def current_platform() -> Platform:
    """CUDA when torch sees a device, else the CPU."""
    import torch

    if torch.cuda.is_available():
        from rlhf_mcore.platform.cuda import CudaPlatform

        return CudaPlatform()
    from rlhf_mcore.platform.cpu import CpuPlatform

    return CpuPlatform()
