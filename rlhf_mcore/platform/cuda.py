"""The CUDA platform: one GPU per process."""

from __future__ import annotations

import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.machine import bind_to_cores, numa_node
from rlhf_mcore.platform.base import Copies, Platform

# Values of variables that fix the order of sums; the first is the default. cuBLAS: over streams (its documentation,
# "Results reproducibility"). NCCL: its sums in switches (NVLS) have no fixed order. If the user set another value, a
# rank keeps it and reports it.
_FIXED_SUMS = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("^NVLS,NVLSTree", "^NVLS", "Ring", "Tree"),
}
_ALIGNMENT = 16  # bytes; enough for any dtype


class CudaPlatform(Platform):
    """The platform of a process with one GPU. Megatron-core was written for GPUs, so this class changes little."""

    name = "cuda"
    collective_backend = "cpu:gloo,cuda:nccl"
    default_dtype = "bf16"

    def __init__(self) -> None:
        # the arguments of Transformer Engine's buffers
        self._exchanged: tuple[tuple[int, int], int, bool] | None = None
        self._is_deterministic = False

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def setup_process(self, local_rank: int, threads: int, deterministic: bool = False) -> None:
        self._is_deterministic = deterministic
        if deterministic:
            os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = (
                "0"  # otherwise Megatron rejects Transformer Engine's attention
            )
            for name, values in _FIXED_SUMS.items():
                os.environ.setdefault(name, values[0])
        if local_rank >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"LOCAL_RANK={local_rank}: this machine has {count} GPU{'s' * (count != 1)}, and each process takes one; start "
                f"at most {count} here (torchrun's --nproc-per-node, --ranks-per-node or --gpus-per-node)"
            )
        torch.cuda.set_device(local_rank)
        # A rank compiles only a few small kernels. By default, torch would start up to 32 processes per rank for
        # them.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def bind_to_node(self) -> None:
        found: Any = torch.cuda.get_device_properties(self.device())
        domain, bus, device = (getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
        if (node := numa_node(address)) is not None:
            bind_to_cores(node[1])

    def varying(self) -> str:
        for name, values in _FIXED_SUMS.items():
            if (value := os.environ.get(name, "")) not in values:
                return f"{name}={value} does not fix the order of sums; unset it, or set it to {' or '.join(values)}"
        return ""

    @contextmanager
    def megatron_region(self) -> Iterator[None]:
        """Choose torch's deterministic kernels for the trainer only.

        An engine in this process must be able to record graphs.

        If torch lacks a deterministic kernel, it warns (RLHF_MCORE_DEBUG shows the warning).
        """
        if not self._is_deterministic:
            yield
            return
        settings: Any = torch.utils.deterministic
        mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = False  # all memory is written before it is read
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = fills

    def prepare_megatron(self) -> None:
        """Prepare Megatron-core (:meth:`Platform.prepare_megatron`).

        Replace the permutation of version 0.16, which waits for the device, unless Transformer Engine provides a
        fused permutation.
        """
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        from rlhf_mcore.platform.megatron_versions import PERMUTE_WAITS

        super().prepare_megatron()
        if (
            PERMUTE_WAITS
            and token_dispatcher.permute is moe_utils.permute
            and getattr(moe_utils, "fused_permute", None) is None
        ):
            token_dispatcher.permute = partial(_permute, moe_utils.permute)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device())

    def memory_bytes(self) -> int | None:
        return int(torch.cuda.get_device_properties(self.device()).total_memory)

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def outside_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        # torch rounds pinned memory up to a power of two. For 33 GB it would allocate 64.
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)):
            # CUDA reports the error at the next launch, so launch an operation that can fail
            with suppress(RuntimeError):
                torch.ones(1, device=self.device())
            logging.getLogger(__name__).warning(
                f"CUDA could not pin {num_bytes / 2**30:.1f} GiB of host memory (cudaHostRegister: error {error}); copies to and "
                "from it are slower. The memory limit of the host or the container may be too low."
            )
        else:
            pages.forget = partial(runtime.cudaHostUnregister, buffer.data_ptr())
        return buffer

    def copies(self) -> Copies:
        return _CudaCopies()

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Copy in one piece, from pinned memory that torch keeps until the copy is complete.
        starts = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        for tensor, start in zip(tensors, starts, strict=False):
            _view_of(staged, start, tensor).copy_(tensor)
        on_device = staged.to(self.device(), non_blocking=True)
        return [_view_of(on_device, start, tensor) for tensor, start in zip(tensors, starts, strict=False)]

    def range(self, name: str) -> AbstractContextManager[None]:
        region: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
        return region

    def overlap_tensor_parallel(self, shape: tuple[int, int], tp: int, fp8: bool, backend: str) -> None:
        asked = (shape, tp, fp8)
        if self._exchanged not in (None, asked):
            raise ValueError(
                f"Transformer Engine supports one set of buffers; it is {self._exchanged} (shape, tp, fp8), not {asked}"
            )
        if self._exchanged is None:
            from transformer_engine.pytorch.module.base import initialize_ub

            initialize_ub(shape=list(shape), tp_size=tp, use_fp8=fp8, bootstrap_backend=backend)
            self._exchanged = asked

    def in_thread(self, work: Callable[[], None]) -> Future[None]:
        device, so_far = self.device(), torch.cuda.current_stream().record_event()

        def run_on_own_stream() -> None:
            stream = torch.cuda.Stream(device)  # each thread has its own current device
            stream.wait_event(so_far)
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()

        return super().in_thread(run_on_own_stream)


def _permute(
    permute: Callable[..., Any],
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Sort tokens [n, hidden] by their experts in ``routing_map`` [n, experts], like Megatron's ``permute``.

    Megatron's function selects by a mask, so the host waits for the number of tokens. Here the number is already
    known: ``num_out_tokens``.
    """
    if fused or drop_and_pad or others or not isinstance(num_out_tokens, int):
        permuted: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] = permute(
            tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **others
        )
        return permuted
    by_expert = routing_map.T.flatten().to(torch.int8)
    places = by_expert.argsort(descending=True, stable=True)[:num_out_tokens]
    indices = places % len(tokens)
    chosen = None if probs is None else probs.T.flatten().index_select(0, places)
    return tokens.index_select(0, indices), chosen, indices


class _Pages(mmap.mmap):
    """Whole pages of host memory, which share no page with other memory that CUDA knows.

    CUDA must unregister them when they are freed. Otherwise it would copy to the memory that their addresses used
    before.
    """

    forget: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.forget is not None and not sys.is_finalizing():
            self.forget()


def _view_of(buffer: torch.Tensor, start: int, tensor: torch.Tensor) -> torch.Tensor:
    """View bytes of a flat uint8 buffer as a tensor with the dtype and shape of ``tensor``."""
    return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class _CudaCopies(Copies):
    """Copy on a separate stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def __call__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        copied = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(copied)

    def synchronize(self) -> None:
        self._stream.synchronize()
