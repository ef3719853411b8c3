"""NVIDIA GPUs: the device Megatron-core was written for, so there is little to do."""

from __future__ import annotations

import torch

from rlhf_mcore.platform.base import Platform


class CudaPlatform(Platform):
    """One GPU per process."""

    name = "cuda"
    collective_backend = "cpu:gloo,cuda:nccl"
    default_dtype = "bf16"

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def setup_process(self, local_rank: int, threads: int) -> None:
        torch.cuda.set_device(local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()
