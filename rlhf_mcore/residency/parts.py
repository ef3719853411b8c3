"""A movable part of a model: the storages of its tensors on the device, and one buffer on the host.

A storage is emptied and refilled in place. Every view of it (a parameter, its gradient, a shard of the optimizer, a
source of the bridge) therefore stays the same tensor.

Megatron-core frees gradient buffers in this way too. It can also offload parameters and optimizers
(``offload_to_cpu``), but it allocates unpinned memory at each move and copies back unchanged data. This module moves
these two instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.platform import Platform

_ALIGNMENT = 512  # alignment in bytes of a storage in the host buffer


class MovablePart:
    """Tensors that move to and from the device together.

    Args:
        name: name in the ledger.
        tensors: views of all storages. Several views may share a storage.
        platform: makes the copies and the host buffer.
        copied: False if the content is not needed again. It is then freed, and undefined after the part comes back.
        lingers: whether the part may stay on the device after its use, until the memory is needed.
    """

    def __init__(
        self, name: str, tensors: Iterable[Tensor], platform: Platform, *, copied: bool = True, lingers: bool = True
    ) -> None:
        self.name, self.copied, self.lingers = name, copied, lingers
        self.is_resident, self.users = True, 0
        self._storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        self.num_bytes = sum(self._sizes.values())
        self._copies = platform.copies()
        self._offsets: dict[int, int] = {}
        self._host: Tensor | None = None
        self._is_stored = False  # whether the host's copy is current
        self._wait: Callable[[], None] | None = None  # waits for a copy in flight
        self.reader: Future[None] | None = None  # a thread that reads the tensors on the device
        offset = 0
        for key, size in self._sizes.items():
            self._offsets[key] = offset
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._host_bytes, self._allocate = offset, platform.host_buffer

    def mark_modified(self) -> None:
        """Mark the device's tensors as modified."""
        self._is_stored = False

    def begin_storing(self) -> None:
        """Start to copy modified content to the host. The device must not modify it meanwhile."""
        if self.copied and not self._is_stored:
            self._finish_copy()
            if self._host is None:
                self._host = self._allocate(self._host_bytes)
            self._wait = self._copies([(self._on_host(key), self._on_device(key)) for key in self._storages])
            self._is_stored = True

    def leave(self) -> None:
        """Copy the content to the host if it is needed, then free the device's memory."""
        if self.reader is not None:
            wait([self.reader])
            self.reader = None
        self.begin_storing()
        self._finish_copy()
        for storage in self._storages.values():
            storage.resize_(0)
        self.is_resident = False

    def come(self) -> None:
        """Allocate the device's memory and start to fill it. :meth:`ready` waits for the copy."""
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])
        self.is_resident = True
        if self.copied:
            self._wait = self._copies([(self._on_device(key), self._on_host(key)) for key in self._storages])

    def ready(self) -> None:
        """Make later operations of the device wait for the copy."""
        self._finish_copy()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the host's copy of one of the tensors, in the same shape.

        Data written to it is on the device after the part comes back.
        """
        assert not self.is_resident and self._host is not None, self.name
        self._copies.synchronize()
        flat = self._on_host(tensor.untyped_storage()._cdata).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset() + tensor.storage_offset())

    def _finish_copy(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def _on_device(self, key: int) -> Tensor:
        storage = self._storages[key]
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _on_host(self, key: int) -> Tensor:
        assert self._host is not None
        return self._host[self._offsets[key] : self._offsets[key] + self._sizes[key]]


class Gradients(MovablePart):
    """Gradient buffers, which Megatron-core frees and allocates itself."""

    def __init__(self, name: str, chunks: Iterable[Any], platform: Platform) -> None:
        self._chunks = list(chunks)
        buffers = [buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        super().__init__(name, [buffer.grad_data for buffer in buffers], platform, copied=False)

    def leave(self) -> None:
        """Free the buffers."""
        for chunk in self._chunks:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        self.is_resident = False

    def come(self) -> None:
        """Allocate the buffers, filled with zeros."""
        for chunk in self._chunks:
            chunk.restore_grad_buffers(synchronize=False)
        self.is_resident = True
