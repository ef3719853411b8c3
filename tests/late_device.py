"""A device that copies late: what CUDA does with memory and streams, on the CPU, for the code of ``CudaPlatform`` as it is.

It stands for ``torch.cuda``. Computation is done at once, on the host's tensors. A copy that is given to a stream of its own is made
as late as CUDA may make it, when another stream waits for it; until then its destination holds NaN, or bytes of 255, and what is
written to its source meanwhile travels. The host sees what was copied to it when it has itself waited for the stream. Memory that a
storage has given back comes again with such bytes. Pinned memory is counted.
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
    """Fill it with what nobody has computed."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1)


class Event:
    """What a stream has been given so far."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def happen(self) -> None:
        self._stream.work_to(self._count)


class Stream:
    """Work in order, done when somebody waits for it."""

    def __init__(self, _device: object = None) -> None:
        self._work: list[Callable[[], None]] = []
        self._done, self._lock, self.follows = 0, threading.RLock(), False
        self._landing: list[tuple[Tensor, Tensor]] = []  # what the host does not see yet

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
    """The stream that everything else is given to, which does at once what it is given; only the host hears late of it."""

    def wait_event(self, event: Event) -> None:
        event.happen()


class LateCuda:
    """Stands for ``torch.cuda``, and for its runtime library.

    Args:
        refuses: the error of every cudaHostRegister.
    """

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.last_error = refuses, 0
        self.pinned: dict[int, int] = {}  # bytes by address
        self.num_late = 0  # copies that were made beside the computation
        self._computing, self._streams, self._here = _Computing(), list[Stream](), threading.local()
        # What is asked of torch.cuda.
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
        """``torch.empty``: torch's own pinned memory is plain here, and not counted."""
        return torch.empty(*sizes, **named)

    def launch(self, *_: Any, **__: Any) -> Tensor:
        """As torch launches a kernel: it raises what CUDA remembers, which forgets it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.ones(1)

    def copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """``Tensor.copy_``."""
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
        """``UntypedStorage.resize_``."""
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
    """The CPU's as far as Megatron and collectives go, CUDA's in all that is memory, copies and threads."""

    def is_host(self, device: torch.device) -> bool:
        return False


def install(monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> LateCuda:
    """Make it the device of this process."""
    cuda = LateCuda(refuses)
    monkeypatch.setattr(
        rlhf_mcore.platform.cuda, "torch", ModuleView(torch, {"cuda": cuda, "ones": cuda.launch, "empty": cuda.empty})
    )
    monkeypatch.setattr(cpu, "CpuPlatform", LatePlatform)
    monkeypatch.setattr(Tensor, "copy_", lambda to, source, non_blocking=False: cuda.copy(to, source, non_blocking))
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: cuda.resize(storage, size))
    return cuda
