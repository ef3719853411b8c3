"""The interface of a device, with what is the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch

# Of models, by their names in a configuration.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Copies:
    """Copies between the device and the host, each from the second tensor of a pair to the first. Here they are made at once."""

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Begin them, behind all that the device was given to do. What is returned lets the device wait until they are made."""
        for to, source in pairs:
            to.copy_(source)
        return lambda: None

    def synchronize(self) -> None:
        """Wait until all copies are made."""


class Platform:
    """A kind of device. One instance serves a process."""

    name: ClassVar[str]
    collective_backend: ClassVar[str]  # argument of torch.distributed.init_process_group
    default_dtype: ClassVar[str]

    def device(self) -> torch.device:
        """Return the device of this process."""
        raise NotImplementedError

    def dtype(self, name: str) -> str:
        """Return fp32, bf16 or fp16, by its name in a configuration, where "auto" leaves it to the device."""
        return self.default_dtype if name == "auto" else name

    def setup_process(self, local_rank: int, threads: int, deterministic: bool = False) -> None:
        """Claim the device and set compute threads. Called once, before the process group is made.

        ``deterministic``: of a computation's kernels and sums, those are chosen whose results are the same bits in each run.

        Raises:
            ConfigError: there are fewer devices than processes.
        """
        raise NotImplementedError

    def bind_to_node(self) -> None:
        """Run this process on the cores of the NUMA node that its device is attached to, where there are several nodes."""

    def is_host(self, device: torch.device) -> bool:
        """Tell whether tensors of a device are in the host's memory."""
        return device.type == "cpu"

    def varying(self) -> str:
        """Explain why two equal runs of this process could differ in the last bits; "" where nothing is known."""
        return ""

    def prepare_megatron(self) -> None:
        """Make an imported Megatron-core usable on this device. Called after its modules are imported; idempotent."""
        from megatron.core import utils
        from megatron.core.optimizer import clip_grads
        from megatron.core.transformer.moe import moe_utils

        if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
            clip_grads.l2_norm_impl = _norm_of_all
        if not moe_utils.HAVE_TE:
            # Routers ask whether it is None; without Transformer Engine 0.16 does not define it.
            moe_utils.te_general_gemm = None

    def megatron_region(self) -> AbstractContextManager[None]:
        """Enter the region around every call into Megatron-core."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Give cached device memory back."""

    def device_name(self) -> str:
        """Return the name of the device; "" if it is the host."""
        return ""

    def memory_bytes(self) -> int | None:
        """Return the memory of the device, whoever uses it; None where the host's memory is all there is."""
        return None

    def free_bytes(self) -> int | None:
        """Return the memory of the device that nobody uses; None where that is not known."""
        return None

    def outside_bytes(self) -> int | None:
        """Return the device memory that is in use and not reserved by torch; None if that is not known."""
        return None

    def reset_peak(self) -> None:
        """Begin to watch the most memory that is allocated at a time."""

    def peak_bytes(self) -> int | None:
        """Return the peak since then; None where it is not known."""
        return None

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate bytes of host memory, uninitialised, that copies to and from the device are fast with."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copies(self) -> Copies:
        """Make a queue of copies that follow each other, beside other work of the device."""
        return Copies()

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the host as they are on the device. The host waits for none of them; what uses them comes after."""
        return list(tensors)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Name what the device is given inside for its own tools."""
        return nullcontext()

    def overlap_tensor_parallel(self, shape: tuple[int, int], tp: int, fp8: bool, backend: str) -> None:
        """Make the buffers through which ``tp`` ranks exchange rows of hidden states [tokens, hidden] while they compute.

        Raises:
            ValueError: there are others, of another shape.
        """
        raise NotImplementedError

    def in_thread(self, work: Callable[[], None]) -> Future[None]:
        """Do work on tensors in a thread of its own, after all that the device has been given so far, beside what it is given next."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)
        return future


def _norm_of_all(
    size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *args: Any
) -> tuple[torch.Tensor, None]:
    """Compute the norm [1] of all elements, for Megatron without fused kernels: its own reads one number a tensor from the device."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().reshape(1), None


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
