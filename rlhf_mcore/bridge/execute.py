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

from rlhf_mcore.bridge.rank_plan import Bucket, Copy, Message, RankPlan
from rlhf_mcore.platform import current_platform


class Destinations(Protocol):
    """Where received elements go. Some tensors exist only while their layer is being reloaded."""

    def open(self, bucket: int) -> Mapping[str, Tensor]:
        """Flat tensors by buffer name that a bucket writes."""
        ...

    def close(self, bucket: int) -> None:
        """The bucket is written: what it completes can be put to use."""
        ...


@dataclass(slots=True)
class _Packet:
    """A message in the bytes in which it travels. ``parts`` are its rectangles there; none if another packet has the same bytes."""

    message: Message
    flat: Tensor
    parts: list[Tensor]


@dataclass(slots=True)
class _Staged:
    """All of a bucket that is the same in every run: its messages in their places, and views of the source tensors."""

    sends: list[list[_Packet]]  # by phase
    receives: list[list[_Packet]]
    outgoing: list[list[Tensor]]  # what the sends of phase 0 are packed from
    local: list[Tensor]


@dataclass(slots=True)
class _InFlight:
    bucket: Bucket
    staged: _Staged
    works: list[dist.Work]
    receives: list[tuple[Message, list[Tensor]]]


class Executor:
    """Runs one rank's plan again and again over the same source tensors.

    Buckets take turns in ``depth`` buffers. On the host these stay for the next run, for there a fresh page costs as much as what is
    written to it; a device's allocator keeps pages itself, and between runs they belong to others.

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
        # A rank may hold no part of the model, and still receive.
        self._device = next((flat.device for flat in sources.values()), current_platform().device())
        self._staged: dict[int, _Staged] = {}
        self._alignment = max(dtype.itemsize for dtype in dtypes.values())
        sizes = [self._bytes_of(bucket) for bucket in plan.buckets]
        self._buffer_bytes = [max(sizes[slot::depth], default=0) for slot in range(depth)]
        self._buffers: list[Tensor] = []

    @property
    def peak_bytes(self) -> int:
        """Extra memory of a run."""
        return sum(self._buffer_bytes)

    def run(self, destinations: Destinations) -> None:
        """Transfer everything once. Collective over the ranks of the plan."""
        buffers = self._buffers or [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._buffer_bytes
        ]
        staged = self._staged
        # A run that fails leaves nothing behind: messages may still be arriving.
        self._buffers, self._staged = [], {}
        flying: deque[_InFlight] = deque()
        try:
            for number, bucket in enumerate(self._plan.buckets):
                if bucket.index not in staged:
                    staged[bucket.index] = self._stage(bucket, buffers[number % self._depth])
                flying.append(self._launch(bucket, staged[bucket.index]))
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
        if self._device.type == "cpu":
            self._buffers, self._staged = buffers, staged

    def _launch(self, bucket: Bucket, staged: _Staged) -> _InFlight:
        return self._post(bucket, staged, 0, staged.outgoing)

    def _post(self, bucket: Bucket, staged: _Staged, phase: int, outgoing: list[list[Tensor]]) -> _InFlight:
        """Receives are posted first, so that no send waits for its peer to be ready."""
        sends, receives, tag = staged.sends[phase], staged.receives[phase], 2 * bucket.index + phase
        for packet, views in zip(sends, outgoing, strict=True):
            _copy(packet.parts, views)
        operations = [dist.P2POp(dist.irecv, packet.flat, packet.message.peer, tag=tag) for packet in receives]
        operations += [dist.P2POp(dist.isend, packet.flat, packet.message.peer, tag=tag) for packet in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _InFlight(bucket, staged, works, [(packet.message, packet.parts) for packet in receives])

    def _land(self, flight: _InFlight, destinations: Destinations) -> None:
        """Wait for a bucket and write it, hand on what other ranks of the node wait for, and copy what is here already."""
        bucket, staged = flight.bucket, flight.staged
        buffers = destinations.open(bucket.index)
        _copy([self._view(copy.destination, buffers) for copy in bucket.local], staged.local)
        self._scatter(flight, buffers)
        if staged.sends[1] or staged.receives[1]:
            outgoing = [self._views(packet, buffers) for packet in staged.sends[1]]
            self._scatter(self._post(bucket, staged, 1, outgoing), buffers)
        destinations.close(bucket.index)

    def _scatter(self, flight: _InFlight, buffers: Mapping[str, Tensor]) -> None:
        for work in flight.works:
            work.wait()
        for message, parts in flight.receives:
            _copy([self._view(copy, buffers) for copy in message.copies], parts)

    def _stage(self, bucket: Bucket, buffer: Tensor) -> _Staged:
        sends, receives, end = [], [], 0
        for phase in bucket.phases:
            offsets, end = self._lay_out(phase.sends, end)
            sends.append([self._packet(*pair, buffer, offsets) for pair in enumerate(phase.sends)])
            offsets, end = self._lay_out(phase.receives, end)
            receives.append([self._packet(*pair, buffer, offsets) for pair in enumerate(phase.receives)])
        outgoing = [self._views(packet, self._sources) for packet in sends[0]]
        return _Staged(sends, receives, outgoing, [self._view(copy.source, self._sources) for copy in bucket.local])

    def _bytes_of(self, bucket: Bucket) -> int:
        end = 0
        for phase in bucket.phases:
            for messages in (phase.sends, phase.receives):
                _, end = self._lay_out(messages, end)
        return end

    def _lay_out(self, messages: Sequence[Message], end: int) -> tuple[list[int], int]:
        """Where messages lie, one behind the other from byte ``end``, and where they end. What several peers get lies there once."""
        offsets: list[int] = []
        for number, message in enumerate(messages):
            twin = next((k for k in range(number) if messages[k].copies == message.copies), None)
            offsets.append(end if twin is None else offsets[twin])
            if twin is None:
                end += -(-message.nbytes // self._alignment) * self._alignment
        return offsets, end

    def _packet(self, number: int, message: Message, buffer: Tensor, offsets: list[int]) -> _Packet:
        flat = buffer[offsets[number] : offsets[number] + message.nbytes]
        is_first = offsets.index(offsets[number]) == number
        return _Packet(message, flat, [self._part(copy, flat) for copy in message.copies] if is_first else [])

    def _part(self, copy: Copy, flat: Tensor) -> Tensor:
        """A rectangle's place in a message."""
        raw = flat[copy.message_offset : copy.message_offset + copy.nbytes]
        return raw.view(self._dtypes[copy.hf_name]).view(copy.shape)

    def _views(self, packet: _Packet, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        """What a packet is packed from."""
        return [self._view(copy, buffers) for copy in packet.message.copies] if packet.parts else []

    def _view(self, copy: Copy, buffers: Mapping[str, Tensor]) -> Tensor:
        """A rectangle's place in a local tensor."""
        flat = buffers[copy.buffer]
        return flat.as_strided(copy.shape, copy.strides, flat.storage_offset() + copy.offset)


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Many copies in one call; a dtype that differs is converted by the copy."""
    if to:
        torch._foreach_copy_(list(to), list(source))


def _settle(flight: _InFlight) -> None:
    """Wait until a bucket is off the wire, whatever became of it."""
    for work in flight.works:
        with contextlib.suppress(RuntimeError):
            work.wait()
