"""Run a rank's plan bucket by bucket: one message per peer, and direct copies for local data.

While a bucket is on the wire, the next bucket is packed. So packing, sending and unpacking overlap. Messages in
flight need extra memory: at most 2 * depth * bucket_bytes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import DEPTH, Bucket, Copy, Message, RankPlan
from rlhf_mcore.bridge.run.endpoints import Destinations, Sources
from rlhf_mcore.bridge.run.transports import (
    ChangedMessages,
    Exchange,
    Links,
    MappedMemory,
    Packet,
    PointToPoint,
    SharedMemory,
)
from rlhf_mcore.platform import current_platform


@dataclass(slots=True)
class _Outgoing:
    """Views of source tensors that a bucket reads: for each message of phase 0, and for local copies."""

    sends: list[list[Tensor]]
    local: list[Tensor]


@dataclass(slots=True)
class _Flight:
    bucket: Bucket
    exchange: Exchange
    receives: list[Packet]
    local: list[Tensor]


class Executor:
    """Run one rank's plan repeatedly over the same sources.

    On the host, message memory is kept for the next run, because a new page costs as much as writing to it. A
    device's allocator caches pages itself, so the memory is available to others between runs.

    Args:
        plan: this rank's plan. Its peers are ranks of the links' group.
        sources: the tensors to send.
        dtypes: the dtype of each Hugging Face tensor on the wire.
        links: links between the ranks. On the host, ranks of one machine read messages in the sender's memory
            instead of receiving them. Building an executor is a collective call.
        depth: number of buckets in flight.
        changes: sends messages without unchanged elements. Shared memory is not used then.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Sources,
        dtypes: Mapping[str, torch.dtype],
        links: Links,
        depth: int = DEPTH,
        changes: ChangedMessages | None = None,
    ):
        self._plan, self._sources, self._depth, self._changes = plan, sources, depth, changes
        self._staging = Staging(plan, dtypes, depth, sources.device)
        direct = PointToPoint(links)
        self._transport: PointToPoint | SharedMemory = direct
        self._keeps_memory = current_platform().is_host(sources.device)
        if changes is None:
            senders = {message.peer for bucket in plan.buckets for phase in bucket.phases for message in phase.receives}
            if (memory := links.share(self._staging.send_bytes, senders, sources.device)) is not None:
                self._keeps_memory = True  # peers have mapped or registered it
                self._staging.pack_into(memory)
                self._transport = SharedMemory(links, memory, self._staging.views, direct)
        self._outgoing: dict[int, _Outgoing] = {}  # static sources only, by bucket
        # By slot: exchanges whose packed data may still be read.
        self._posted: list[list[Exchange]] = [[] for _ in range(depth)]

    @property
    def peak_bytes(self) -> int:
        """Extra bytes that a run needs."""
        return self._staging.nbytes

    def run(self, destinations: Destinations, *, is_full: bool = True) -> None:
        """Transfer everything once. With ``changes`` and without ``is_full``, transfer only changes.

        This is a collective call over the plan's ranks.
        """
        flying: deque[_Flight] = deque()
        if self._changes is not None:
            self._changes.begin(destinations, is_full=is_full)
        try:
            for bucket in self._plan.buckets:
                flying.append(self._launch(bucket))
                if len(flying) == self._depth:
                    self._complete(flying[0], destinations)
                    flying.popleft()
            while flying:
                self._complete(flying[0], destinations)
                flying.popleft()
            for slot in range(self._depth):
                self._settle(slot)
        except BaseException:
            # Dropping a message on the wire would break the connection for later messages.
            exchanges = [exchange for posted in self._posted for exchange in posted]
            for exchange in exchanges:
                with contextlib.suppress(RuntimeError):
                    exchange.arrive()
                with contextlib.suppress(RuntimeError):
                    exchange.release()
            for exchange in exchanges:
                with contextlib.suppress(RuntimeError):
                    exchange.settle()
            self._posted = [[] for _ in range(self._depth)]
            self._staging.forget()
            for flight in flying:
                self._close(flight.bucket)
            raise
        if not self._keeps_memory:
            self._staging.forget()

    def _launch(self, bucket: Bucket) -> _Flight:
        """Pack and send a bucket's messages."""
        outgoing = self._outgoing.get(bucket.index)
        if outgoing is None:
            buffers = self._sources.open(bucket)
            sends = [views_of_packet(packet, buffers) for packet in self._staging.stage(bucket).sends[0]]
            outgoing = _Outgoing(sends, [_view(copy.source, buffers) for copy in bucket.local])
            if self._sources.is_static:
                self._outgoing[bucket.index] = outgoing
        self._settle(bucket.index % self._depth)
        exchange, receives = self._post(bucket, 0, outgoing.sends)
        return _Flight(bucket, exchange, receives, outgoing.local)

    def _post(self, bucket: Bucket, phase: int, outgoing: list[list[Tensor]]) -> tuple[Exchange, list[Packet]]:
        staged = self._staging.stage(bucket)
        sends, receives = staged.sends[phase], staged.receives[phase]
        for packet, views in zip(sends, outgoing, strict=True):
            copy_parts(packet.parts, views)
        if phase == 0 and self._changes is not None:
            exchange = self._changes.post(bucket, sends, receives, self._staging.views)
        else:
            exchange = self._transport.post(sends, receives, 2 * bucket.index + phase)
        self._posted[bucket.index % self._depth].append(exchange)
        return exchange, receives

    def _settle(self, slot: int) -> None:
        """Wait until no peer reads the packed data of a slot."""
        for exchange in self._posted[slot]:
            exchange.settle()
        self._posted[slot] = []

    def _complete(self, flight: _Flight, destinations: Destinations) -> None:
        """Wait for a bucket and write it. Forward parts to other ranks of the node, and copy local parts."""
        bucket = flight.bucket
        buffers = destinations.open(bucket)
        copy_parts([_view(copy.destination, buffers) for copy in bucket.local], flight.local)
        _unpack(flight.exchange, flight.receives, buffers)
        forwarded = bucket.phases[1]
        if forwarded.sends or forwarded.receives:
            outgoing = [views_of_packet(packet, buffers) for packet in self._staging.stage(bucket).sends[1]]
            _unpack(*self._post(bucket, 1, outgoing), buffers)
        destinations.close(bucket)
        self._close(bucket)

    def _close(self, bucket: Bucket) -> None:
        if not self._sources.is_static:
            self._sources.close(bucket)


def _unpack(exchange: Exchange, receives: Sequence[Packet], buffers: Mapping[str, Tensor]) -> None:
    exchange.arrive()
    for packet in receives:
        copy_parts([_view(copy, buffers) for copy in packet.message.copies], packet.parts)
    exchange.release()


def views_of_packet(packet: Packet, buffers: Mapping[str, Tensor]) -> list[Tensor]:
    """List the source views of a packet's parts."""
    return [_view(copy, buffers) for copy in packet.message.copies] if packet.parts else []


def _view(copy: Copy, buffers: Mapping[str, Tensor]) -> Tensor:
    """View a rectangle in a local tensor."""
    flat = buffers[copy.buffer]
    return flat.as_strided(copy.shape, copy.strides, flat.storage_offset() + copy.offset)


def copy_parts(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Run many copies in one call. A copy also converts the dtype."""
    if to:
        torch._foreach_copy_(list(to), list(source))


@dataclass(slots=True)
class StagedBucket:
    """The messages of a bucket in memory, by phase. They are the same in every run."""

    sends: list[list[Packet]]
    receives: list[list[Packet]]


class Staging:
    """Memory for buckets. They use ``depth`` slots in turn; each slot has space for sends and receives.

    A message to several peers is stored once. Messages that this rank reads in their senders' memory need no
    space.

    Args:
        plan: this rank's plan.
        dtypes: the dtype of each Hugging Face tensor on the wire.
        depth: number of slots.
        device: device of the memory.
    """

    def __init__(self, plan: RankPlan, dtypes: Mapping[str, torch.dtype], depth: int, device: torch.device):
        self._plan, self._dtypes, self._depth, self._device = plan, dtypes, depth, device
        self._alignment = max(dtype.itemsize for dtype in dtypes.values())
        self._memory: MappedMemory | None = None
        self._sends: list[Tensor] = []
        self._receives: list[Tensor] = []
        self._staged: dict[int, StagedBucket] = {}
        self._measure()

    @property
    def send_bytes(self) -> int:
        """Bytes for the sends of all slots."""
        return sum(self._send_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes for the sends and receives of all slots."""
        return sum(self._send_bytes) + sum(self._receive_bytes)

    def pack_into(self, memory: MappedMemory) -> None:
        """Pack sends in memory that peers can read."""
        self._memory = memory
        self._measure()

    def stage(self, bucket: Bucket) -> StagedBucket:
        """Return the messages of a bucket. The first call allocates the memory."""
        if not self._sends:
            memory = self._empty(self.send_bytes) if self._memory is None else self._memory.own
            self._sends = list(memory.split(self._send_bytes))
            self._receives = [self._empty(size) for size in self._receive_bytes]
        if bucket.index in self._staged:
            return self._staged[bucket.index]
        slot = bucket.index % self._depth
        staged, sent, received = StagedBucket([], []), 0, 0
        for phase in bucket.phases:
            offsets, sent = self._send_offsets(phase.sends, sent)
            packets = []
            for number, (message, offset) in enumerate(zip(phase.sends, offsets, strict=True)):
                flat = self._sends[slot][offset : offset + message.nbytes]
                is_first = offsets.index(offset) == number
                packets.append(Packet(message, flat, self.views(message, flat) if is_first else []))
            arriving = []
            for message in phase.receives:
                size = self._arriving_bytes(message)
                flat = self._receives[slot][received : received + min(size, message.nbytes)]
                arriving.append(Packet(message, flat, self.views(message, flat) if size else []))
                received += size
            staged.sends.append(packets)
            staged.receives.append(arriving)
        self._staged[bucket.index] = staged
        return staged

    def forget(self) -> None:
        """Drop all memory except the memory that peers have mapped.

        After a failure, messages may still be arriving there.
        """
        self._sends, self._receives, self._staged = [], [], {}

    def views(self, message: Message, flat: Tensor) -> list[Tensor]:
        """View the rectangles of a message in its bytes."""
        ends = [(copy.message_offset, copy.message_offset + copy.nbytes) for copy in message.copies]
        return [
            flat[begin:end].view(self._dtypes[copy.hf_name]).view(copy.shape)
            for copy, (begin, end) in zip(message.copies, ends, strict=True)
        ]

    def _measure(self) -> None:
        """Compute the slot sizes. Each slot fits the largest of its buckets."""
        self._send_bytes, self._receive_bytes = [0] * self._depth, [0] * self._depth
        for bucket in self._plan.buckets:
            slot, sent, received = bucket.index % self._depth, 0, 0
            for phase in bucket.phases:
                _, sent = self._send_offsets(phase.sends, sent)
                received += sum(map(self._arriving_bytes, phase.receives))
            self._send_bytes[slot] = max(self._send_bytes[slot], sent)
            self._receive_bytes[slot] = max(self._receive_bytes[slot], received)

    def _send_offsets(self, messages: Sequence[Message], end: int) -> tuple[list[int], int]:
        """Place messages consecutively from byte ``end``. Return their starts, and the new end."""
        offsets: list[int] = []
        for number, message in enumerate(messages):
            twin = next((k for k in range(number) if messages[k].copies == message.copies), None)
            offsets.append(end if twin is None else offsets[twin])
            if twin is None:
                end += self._round_up(message.nbytes)
        return offsets, end

    def _arriving_bytes(self, message: Message) -> int:
        is_mapped = self._memory is not None and message.peer in self._memory.of
        return 0 if is_mapped else self._round_up(message.nbytes)

    def _round_up(self, size: int) -> int:
        return -(-size // self._alignment) * self._alignment

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
