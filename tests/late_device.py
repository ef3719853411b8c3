"""A device that copies late. It simulates CUDA's memory and streams on the CPU, for the unchanged code of ``CudaPlatform``.

It replaces ``torch.cuda``. Computation happens immediately, on host tensors. A copy on a separate stream happens as late as CUDA
allows, when another stream waits for it. Until then its destination contains NaN or bytes of 255, and later changes of its source are
copied too. The host sees copied values only after it has waited for the stream. Freed memory is returned with such bytes when it is
allocated again. Pinned memory is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf_mcore.platform.cuda
from rlhf_mcore.platform import ModuleView, cpu
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.cuda import CudaPlatform

_copy, _resize = Tensor.copy_, torch.UntypedStorage.resize_


def poison(tensor: Tensor) -> None:
    """Fill a tensor with values that no computation produces."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1)


class Event:
    """The work of a stream up to a point."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def happen(self) -> None:
        self._stream.work_to(self._count)


class Stream:
    """Work in order. It is done when another stream or the host waits for it."""

    def __init__(self, _device: object = None) -> None:
        self._work: list[Callable[[], None]] = []
        self._done, self._lock, self.follows = 0, threading.RLock(), False
        self._landing: list[tuple[Tensor, Tensor]] = []  # copies that the host does not see yet

    def copy_to_host(self, to: Tensor, source: Tensor) -> None:
        self._landing.append((to, source.clone()))

    def copy_to_device(self, to: Tensor, source: Tensor) -> None:
        self._land()
        _copy(to, source)

    def _land(self) -> None:
        for to, value in self._landing:
            _copy(to, value)
        self._landing.clear()

    def give(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def work_to(self, count: int) -> None:
        with self._lock:
            while self._done < count:
                self._done += 1
                self._work[self._done - 1]()

    def record_event(self) -> Event:
        return Event(self, len(self._work))

    def wait_event(self, event: Event) -> None:
        self.follows = True
        self.give(event.happen)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.work_to(len(self._work))
        self._land()


class _Computing(Stream):
    """The default stream, which executes all other work immediately. Only the host sees the results late."""

    def wait_event(self, event: Event) -> None:
        event.happen()


class LateCuda:
    """Replaces ``torch.cuda`` and its runtime library.

    Args:
        refuses: error code of every cudaHostRegister; 0: success.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.last_error = refuses, 0
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.num_late = 0  # copies on other streams than the computation
        self._computing, self._streams, self._here = _Computing(), list[Stream](), threading.local()
        # Functions of torch.cuda.
        self.cudart = lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.pinned.pop)
        self.is_available, self.empty_cache, self.reset_peak_memory_stats = lambda: False, lambda: None, lambda: None
        self.max_memory_allocated, self.memory_reserved, self.mem_get_info = lambda: 0, lambda: 0, lambda: (0, 0)
        self.get_device_properties = lambda _: SimpleNamespace(total_memory=0)

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned.values())

    def Stream(self, device: object = None) -> Stream:  # torch's name
        self._streams.append(Stream(device))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        found: Stream = getattr(self._here, "stream", self._computing)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream, stream.follows = before, False

    def synchronize(self) -> None:
        for stream in (*self._streams, self._computing):
            stream.synchronize()

    def empty(self, *sizes: int, pin_memory: bool = False, **named: Any) -> Tensor:
        """Replace ``torch.empty``. torch's own pinned memory is plain memory here and is not counted."""
        return torch.empty(*sizes, **named)

    def launch(self, *_: Any, **__: Any) -> Tensor:
        """Replace a kernel launch of torch, which raises the last error of CUDA and clears it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.ones(1)

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Replace ``Tensor.copy_``."""
        stream = self.current_stream()
        if stream is not self._computing:
            assert stream.follows, "the stream begins before what it copies was computed"
            if not non_blocking:
                stream.synchronize()
            elif to.numel():
                assert self.refuses or self._is_pinned(to) or self._is_pinned(source), (
                    "slow: no end of the copy is pinned"
                )
                self.num_late += 1
                poison(to)
                stream.give(lambda: self._make(stream, to, source))
                return to
        elif non_blocking and self._is_pinned(to):
            poison(to)
            stream.copy_to_host(to, source)
            return to
        return _copy(to, source)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Replace ``UntypedStorage.resize_``."""
        before = storage.nbytes()
        if before and not size:
            poison(torch.empty(0, dtype=torch.uint8).set_(storage))
        _resize(storage, size)
        if size and not before:
            poison(torch.empty(0, dtype=torch.uint8).set_(storage))

    def _make(self, stream: Stream, to: Tensor, source: Tensor) -> None:
        assert to.untyped_storage().nbytes() and source.untyped_storage().nbytes(), (
            "memory was freed before a copy of it"
        )
        with torch.no_grad():
            (stream.copy_to_host if self._is_pinned(to) else stream.copy_to_device)(to, source)

    def _register(self, address: int, num_bytes: int, _flags: int) -> int:
        self.last_error = self.last_error or self.refuses
        if not self.refuses:
            assert address % 4096 == 0 and address not in self.pinned
            self.pinned[address] = num_bytes
        return self.refuses

    def _is_pinned(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < begin + size for begin, size in self.pinned.items())


class LatePlatform(CpuPlatform, CudaPlatform):
    """A platform that is the CPU's for Megatron and collectives, and CUDA's for memory, copies and threads."""

    def is_host(self, device: torch.device) -> bool:
        return False


def install(monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> LateCuda:
    """Make the late device the device of this process."""
    cuda = LateCuda(refuses)
    monkeypatch.setattr(
        rlhf_mcore.platform.cuda, "torch", ModuleView(torch, {"cuda": cuda, "ones": cuda.launch, "empty": cuda.empty})
    )
    monkeypatch.setattr(cpu, "CpuPlatform", LatePlatform)
    monkeypatch.setattr(Tensor, "copy_", lambda to, source, non_blocking=False: cuda.copy(to, source, non_blocking))
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: cuda.resize(storage, size))
    return cuda
