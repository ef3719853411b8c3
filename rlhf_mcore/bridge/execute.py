"""Carrying out a rank's plan: bucket by bucket, one message per peer, what is already here copied straight across.

While a bucket is on the wire the next one is packed, so packing, the wire and scattering overlap. Extra memory is the messages in
flight: at most 2 * depth * bucket.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.rank_plan import Bucket, Copy, Message, Phase, RankPlan


class Destinations(Protocol):
    """Where received elements go. Some tensors exist only while their layer is being reloaded."""

    def open(self, bucket: int) -> Mapping[str, Tensor]:
        """Flat tensors by buffer name that a bucket writes."""
        ...

    def close(self, bucket: int) -> None:
        """The bucket is written: what it completes can be put to use."""
        ...


@dataclass(slots=True)
class _InFlight:
    bucket: Bucket
    works: list[dist.Work]
    receives: list[tuple[Message, Tensor]]
    keep: list[Tensor]  # send buffers, alive until the bucket is done


class Executor:
    """Runs one rank's plan again and again over the same source tensors.

    Args:
        plan: this rank's view.
        sources: flat tensors by buffer name.
        dtypes: the dtype of each Hugging Face tensor on the wire.
        depth: buckets in flight.
    """

    def __init__(
        self, plan: RankPlan, sources: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], depth: int = 2
    ):
        self._plan, self._sources, self._dtypes, self._depth = plan, sources, dtypes, depth
        self._device = next(iter(sources.values())).device
        self.peak_bytes = 0

    def run(self, destinations: Destinations) -> None:
        """Transfer everything once. Collective over the ranks of the plan."""
        flying: deque[_InFlight] = deque()
        try:
            for bucket in self._plan.buckets:
                flying.append(self._launch(bucket))
                self.peak_bytes = max(self.peak_bytes, sum(_buffer_bytes(flight) for flight in flying))
                if len(flying) == self._depth:
                    self._land(flying[0], destinations)
                    flying.popleft()
            while flying:
                self._land(flying[0], destinations)
                flying.popleft()
        except BaseException:
            # A message that is dropped while it is on the wire would break the connection for whatever comes next.
            for flight in flying:
                _settle(flight)
            raise

    def _launch(self, bucket: Bucket) -> _InFlight:
        return self._post(bucket, bucket.phases[0], self._sources, tag=2 * bucket.index)

    def _post(self, bucket: Bucket, phase: Phase, buffers: Mapping[str, Tensor], tag: int) -> _InFlight:
        """Receives are posted first, so that no send waits for its peer to be ready."""
        receives = [(message, self._empty(message.nbytes)) for message in phase.receives]
        operations = [dist.P2POp(dist.irecv, flat, message.peer, tag=tag) for message, flat in receives]
        sends = [self._pack(message, buffers) for message in phase.sends]
        operations += [
            dist.P2POp(dist.isend, flat, message.peer, tag=tag)
            for message, flat in zip(phase.sends, sends, strict=True)
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _InFlight(bucket, works, receives, sends)

    def _land(self, flight: _InFlight, destinations: Destinations) -> None:
        """Wait for a bucket and write it, hand on what other ranks of the node wait for, and copy what is here already."""
        bucket = flight.bucket
        buffers = destinations.open(bucket.index)
        _copy(
            [self._view(copy.destination, buffers) for copy in bucket.local],
            [self._view(copy.source, self._sources) for copy in bucket.local],
        )
        self._scatter(flight, buffers)
        second = bucket.phases[1]
        if second.sends or second.receives:
            self._scatter(self._post(bucket, second, buffers, tag=2 * bucket.index + 1), buffers)
        destinations.close(bucket.index)

    def _scatter(self, flight: _InFlight, buffers: Mapping[str, Tensor]) -> None:
        for work in flight.works:
            work.wait()
        for message, flat in flight.receives:
            _copy(
                [self._view(copy, buffers) for copy in message.copies],
                [self._part(copy, flat) for copy in message.copies],
            )

    def _pack(self, message: Message, buffers: Mapping[str, Tensor]) -> Tensor:
        flat = self._empty(message.nbytes)
        _copy(
            [self._part(copy, flat) for copy in message.copies], [self._view(copy, buffers) for copy in message.copies]
        )
        return flat

    def _part(self, copy: Copy, flat: Tensor) -> Tensor:
        """A rectangle's place in a message."""
        raw = flat[copy.message_offset : copy.message_offset + copy.nbytes]
        return raw.view(self._dtypes[copy.hf_name]).view(copy.shape)

    def _view(self, copy: Copy, buffers: Mapping[str, Tensor]) -> Tensor:
        """A rectangle's place in a local tensor."""
        flat = buffers[copy.buffer]
        return flat.as_strided(copy.shape, copy.strides, flat.storage_offset() + copy.offset)

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Many copies in one call; a dtype that differs is converted by the copy."""
    if to:
        torch._foreach_copy_(list(to), list(source))


def _settle(flight: _InFlight) -> None:
    """Wait until a bucket is off the wire, whatever became of it."""
    for work in flight.works:
        with contextlib.suppress(RuntimeError):
            work.wait()


def _buffer_bytes(flight: _InFlight) -> int:
    return sum(flat.numel() for flat in flight.keep) + sum(flat.numel() for _, flat in flight.receives)
