"""The interface of a device, with shared implementations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

# Model dtypes by their names in a configuration.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Copies:
    """Copies between device and host. A pair is (destination, source). This base class copies immediately."""

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Start the copies after all previous work of the device.

        The returned function makes the device wait until they are complete.
        """
        for to, source in pairs:
            to.copy_(source)
        return lambda: None

    def synchronize(self) -> None:
        """Wait until all copies are complete."""


class Platform:
    """A type of device. A process uses one instance."""

    name: ClassVar[str]
    collective_backend: ClassVar[str]  # argument of torch.distributed.init_process_group
    default_dtype: ClassVar[str]

    def device(self) -> torch.device:
        """Return the device of this process."""
        raise NotImplementedError

    def dtype(self, name: str) -> str:
        """Resolve a dtype name of a configuration to fp32, bf16 or fp16. "auto" selects the device's default."""
        return self.default_dtype if name == "auto" else name

    def setup_process(self, local_rank: int, threads: int, deterministic: bool = False) -> None:
        """Select the device and set compute threads. Called once, before the process group is created.

        ``deterministic``: choose kernels and sums that give the same bits in every run.

        Raises:
            ConfigError: there are fewer devices than processes.
        """
        raise NotImplementedError

    def bind_to_node(self) -> None:
        """Run this process on the cores of its device's NUMA node, if there are several nodes."""

    def is_host(self, device: torch.device) -> bool:
        """Return whether tensors of a device are in the host's memory."""
        return device.type == "cpu"

    def varying(self) -> str:
        """Explain why two equal runs of this process could differ in the last bits; "" if there is no known reason."""
        return ""

    def prepare_megatron(self) -> None:
        """Make Megatron-core usable on this device.

        Call it after importing Megatron's modules. It is idempotent.
        """
        from megatron.core import utils
        from megatron.core.optimizer import clip_grads
        from megatron.core.transformer.moe import moe_utils

        if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
            clip_grads.l2_norm_impl = _norm_of_all
        if not moe_utils.HAVE_TE:
            # Routers test this for None, but 0.16 does not define it without Transformer Engine.
            moe_utils.te_general_gemm = None

    def megatron_region(self) -> AbstractContextManager[None]:
        """Return a context manager that must surround every call into Megatron-core."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for the device."""

    def empty_cache(self) -> None:
        """Release cached device memory."""

    def device_name(self) -> str:
        """Return the name of the device; "" for the host."""
        return ""

    def memory_bytes(self) -> int | None:
        """Return the total memory of the device, or None if the device is the host."""
        return None

    def free_bytes(self) -> int | None:
        """Return the unused memory of the device, or None if that is unknown."""
        return None

    def outside_bytes(self) -> int | None:
        """Return the device memory in use that torch did not reserve, or None if that is unknown."""
        return None

    def reset_peak(self) -> None:
        """Start to measure the peak of allocated memory."""

    def peak_bytes(self) -> int | None:
        """Return the peak since :meth:`reset_peak`, or None if it is unknown."""
        return None

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate uninitialised host memory that is fast to copy to and from the device."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copies(self) -> Copies:
        """Create a queue of copies that run in order, concurrently with other work of the device."""
        return Copies()

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy host tensors to the device. The host does not wait; later device operations do."""
        return list(tensors)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Label the device's work within this block for profilers."""
        return nullcontext()

    def overlap_tensor_parallel(self, shape: tuple[int, int], tp: int, fp8: bool, backend: str) -> None:
        """Create the buffers for overlapped tensor-parallel communication.

        The ``tp`` ranks use them to exchange rows of hidden states [tokens, hidden] while they compute.

        Raises:
            ValueError: buffers of another shape already exist.
        """
        raise NotImplementedError

    def in_thread(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` on tensors in a separate thread.

        It starts after the device's current work and overlaps with later work.
        """
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)
        return future


def _norm_of_all(
    size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *args: Any
) -> tuple[torch.Tensor, None]:
    """Compute the norm [1] of all elements, for Megatron without fused kernels.

    Megatron's own function reads one number per tensor from the device.
    """
    return torch.stack(torch._foreach_norm(lists[0])).norm().reshape(1), None


class ModuleView(ModuleType):
    """A view of a module with replaced attributes. All other attributes are the original's.

    If it replaces the module in another module's globals, only that module's code sees the replacements.
    """

    def __init__(self, original: ModuleType, replacements: dict[str, Any]):
        super().__init__(original.__name__)
        self.__dict__["_original"] = original
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch (CPU and current GPU) at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
