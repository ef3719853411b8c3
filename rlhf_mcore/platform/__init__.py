"""What a device is. Everything above this package is the same code on a CPU and on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # of models, by their names in a configuration


class Platform:
    """A kind of device. One instance serves a process."""

    name: ClassVar[str]
    collective_backend: ClassVar[str]  # argument of torch.distributed.init_process_group
    default_dtype: ClassVar[str]

    def device(self) -> torch.device:
        """The device of this process."""
        raise NotImplementedError

    def dtype(self, name: str) -> str:
        """fp32, bf16 or fp16, by its name in a configuration, where "auto" leaves it to the device."""
        return self.default_dtype if name == "auto" else name

    def setup_process(self, local_rank: int, threads: int) -> None:
        """Claim the device and set compute threads. Called once, before the process group is made."""
        raise NotImplementedError

    def prepare_megatron(self) -> None:
        """Make an imported Megatron-core usable on this device. Called after its modules are imported; idempotent."""

    def megatron_region(self) -> AbstractContextManager[None]:
        """Entered around every call into Megatron-core."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached device memory back."""


class CudaPlatform(Platform):
    """One GPU per process: the device Megatron-core was written for, so there is little to do."""

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


def current_platform() -> Platform:
    """CUDA when torch sees a device, else the CPU."""
    if torch.cuda.is_available():
        return CudaPlatform()
    from rlhf_mcore.platform.cpu import CpuPlatform

    return CpuPlatform()


class ModuleView(ModuleType):
    """A module seen through replacements; everything else is the original's.

    Where it replaces the module in another module's globals, it changes what that module's code sees, and nothing else.
    """

    def __init__(self, original: ModuleType, replacements: dict[str, Any]):
        super().__init__(original.__name__)
        self.__dict__["_original"] = original
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)
