"""Weights that wait in host memory between uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_mcore.mcore.model import MegatronModel


class HostWeights:
    """Host copies of a frozen model's weights, which are on the device only while they are used.

    The copies are kept (pinned where there is a CUDA device): taking the weights off the device again costs nothing, because nobody
    writes to them there.
    """

    def __init__(self, model: MegatronModel):
        self._device = model.platform.device()
        self._tensors = [tensor for chunk in model.chunks for tensor in [*chunk.parameters(), *chunk.buffers()]]
        pinned = self._device.type == "cuda"
        self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in self._tensors]
        self.store()

    def store(self) -> None:
        """Copy what is on the device, and free it there."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor.data)
        self._release()

    def _release(self) -> None:
        for tensor in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)

    @contextmanager
    def resident(self) -> Iterator[None]:
        """The weights are on the device within this block."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.data = torch.empty_like(copy, device=self._device).copy_(copy, non_blocking=True)
        try:
            yield
        finally:
            self._release()
