"""Carrying out a rank's plan: bucket by bucket, one message per peer, what is already here copied straight across.

While a bucket is on the wire the next one is packed, so packing, the wire and scattering overlap. Extra memory is the messages in
flight: at most 2 * depth * bucket.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket, Copy, Message, RankPlan
from rlhf_mcore.bridge.run.nearby import Nearby, share
from rlhf_mcore.platform import current_platform


@dataclass(frozen=True, slots=True)
class Turn:
    """Buffers that exist for a moment only: they are entered, written and left before the next ones are."""

    buffers: frozenset[str]
    enter: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]


class Destinations(Protocol):
    """Where received elements go. Some tensors exist only while their layer is being reloaded."""

    def open(self, bucket: int) -> Mapping[str, Tensor]:
        """Flat tensors by buffer name that a bucket writes, but for those that take turns."""
        ...

    def turns(self, bucket: int) -> Sequence[Turn]:
        """Buffers that the bucket writes whole, one after the other. None in a bucket whose parts are forwarded."""
        return ()

    def close(self, bucket: int) -> None:
        """The bucket is written: what it completes can be put to use."""
        ...


@dataclass(slots=True)
class _Packet:
    """A message as it travels. ``parts`` are its rectangles where it is packed, or where it arrives; none if another has the same.

    To and from ranks that read each other's memory travels only where the message is stored; ``place`` holds that number.
    """

    message: Message
    flat: Tensor
    parts: list[Tensor]
    place: Tensor | None = None

    @property
    def wire(self) -> Tensor:
        return self.flat if self.place is None else self.place


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
    tag: int
    works: list[dist.Work]
    receives: list[_Packet]
    is_read: bool = False


class Executor:
    """Runs one rank's plan again and again over the same source tensors.

    Buckets take turns in ``depth`` buffers. On the host these stay for the next run, for there a fresh page costs as much as what is
    written to it; a device's allocator keeps pages itself, and between runs they belong to others.

    Args:
        plan: this rank's view.
        sources: flat tensors by buffer name.
        dtypes: the dtype of each Hugging Face tensor on the wire.
        depth: buckets in flight.
        nearby: on the host, let ranks of one machine read their messages where they are packed instead of receiving them. The
            executor is built collectively then.
    """

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        depth: int = 2,
        *,
        nearby: bool = False,
    ):
        self._plan, self._sources, self._dtypes, self._depth = plan, sources, dtypes, depth
        # A rank may hold no part of the model, and still receive.
        self._device = next((flat.device for flat in sources.values()), current_platform().device())
        self._alignment = max(dtype.itemsize for dtype in dtypes.values())
        self._staged: dict[int, _Staged] = {}
        self._send_bytes = self._slots(self._sent_bytes)
        self._nearby = self._share() if nearby and self._device.type == "cpu" else None
        self._receive_bytes = self._slots(self._received_bytes)
        self._receive_buffers: list[Tensor] = []
        self._send_buffers: list[Tensor] = []
        # By slot: what tells that messages have been read, by peers and of them.
        self._unread: list[list[dist.Work]] = [[] for _ in range(depth)]

    @property
    def peak_bytes(self) -> int:
        """Extra memory of a run."""
        return sum(self._send_bytes) + sum(self._receive_bytes)

    def run(self, destinations: Destinations) -> None:
        """Transfer everything once. Collective over the ranks of the plan."""
        self._allocate()
        flying: deque[_InFlight] = deque()
        try:
            for bucket in self._plan.buckets:
                if bucket.index not in self._staged:
                    self._staged[bucket.index] = self._stage(bucket)
                flying.append(self._launch(bucket, self._staged[bucket.index]))
                if len(flying) == self._depth:
                    self._land(flying[0], destinations)
                    flying.popleft()
            while flying:
                self._land(flying[0], destinations)
                flying.popleft()
            self._drain()
        except BaseException:
            # A message that is dropped while it is on the wire would break the connection for whatever comes next.
            for flight in flying:
                self._settle(flight)
            with contextlib.suppress(RuntimeError):
                self._drain()
            self._forget()
            raise
        if self._device.type != "cpu":
            self._forget()

    def _slots(self, size_of: Callable[[Bucket], int]) -> list[int]:
        """Size of the buffer of each slot."""
        sizes = [size_of(bucket) for bucket in self._plan.buckets]
        return [max(sizes[slot :: self._depth], default=0) for slot in range(self._depth)]

    def _share(self) -> Nearby:
        senders = {m.peer for bucket in self._plan.buckets for phase in bucket.phases for m in phase.receives}
        return share(sum(self._send_bytes), senders)

    def _allocate(self) -> None:
        if not self._send_buffers:
            sent = self._empty(sum(self._send_bytes)) if self._nearby is None else self._nearby.mine
            self._send_buffers = list(sent.split(self._send_bytes))
            self._receive_buffers = [self._empty(size) for size in self._receive_bytes]

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _forget(self) -> None:
        """Leave nothing behind but what other ranks have mapped: after a failure messages may still be arriving."""
        self._send_buffers, self._receive_buffers, self._staged = [], [], {}
        self._unread = [[] for _ in range(self._depth)]

    def _launch(self, bucket: Bucket, staged: _Staged) -> _InFlight:
        for work in self._unread[slot := bucket.index % self._depth]:
            work.wait()
        self._unread[slot] = []
        return self._post(bucket, staged, 0, staged.outgoing)

    def _post(self, bucket: Bucket, staged: _Staged, phase: int, outgoing: list[list[Tensor]]) -> _InFlight:
        """Receives are posted first, so that no send waits for its peer to be ready."""
        sends, receives, tag = staged.sends[phase], staged.receives[phase], 2 * bucket.index + phase
        for packet, views in zip(sends, outgoing, strict=True):
            _copy(packet.parts, views)
        operations = [dist.P2POp(dist.irecv, packet.wire, packet.message.peer, tag=tag) for packet in receives]
        operations += [dist.P2POp(dist.isend, packet.wire, packet.message.peer, tag=tag) for packet in sends]
        works = _exchanged(operations)
        read = [packet for packet in sends if packet.place is not None]
        self._unread[bucket.index % self._depth] += _exchanged(
            [dist.P2POp(dist.irecv, self._notice(), packet.message.peer, tag=self._answer(tag)) for packet in read]
        )
        return _InFlight(bucket, staged, tag, works, receives)

    def _land(self, flight: _InFlight, destinations: Destinations) -> None:
        """Wait for a bucket and write it, forward what other ranks of the node wait for, and copy what is here already."""
        bucket, staged = flight.bucket, flight.staged
        buffers = destinations.open(bucket.index)
        turns = destinations.turns(bucket.index)
        if turns:
            self._write_in_turns(flight, buffers, turns)
        else:
            _copy([self._view(copy.destination, buffers) for copy in bucket.local], staged.local)
            self._scatter(flight, buffers)
        if staged.sends[1] or staged.receives[1]:
            outgoing = [self._views(packet, buffers) for packet in staged.sends[1]]
            self._scatter(self._post(bucket, staged, 1, outgoing), buffers)
        destinations.close(bucket.index)

    def _scatter(self, flight: _InFlight, buffers: Mapping[str, Tensor]) -> None:
        self._arrive(flight)
        for packet in flight.receives:
            _copy([self._view(copy, buffers) for copy in packet.message.copies], packet.parts)
        self._say_read(flight)

    def _write_in_turns(self, flight: _InFlight, buffers: Mapping[str, Tensor], turns: Sequence[Turn]) -> None:
        """What takes turns is still warm when it is put to use, and no more of it is there at a time than has to be."""
        assert not flight.staged.sends[1], "what is forwarded has to stay"
        self._arrive(flight)
        pairs = list(zip([copy.destination for copy in flight.bucket.local], flight.staged.local, strict=True))
        for packet in flight.receives:
            pairs += zip(packet.message.copies, packet.parts, strict=True)
        turn_of = {buffer: number for number, turn in enumerate(turns) for buffer in turn.buffers}
        written: dict[int | None, list[tuple[Copy, Tensor]]] = defaultdict(list)
        for copy, part in pairs:
            written[turn_of.get(copy.buffer)].append((copy, part))
        self._write(written[None], buffers)
        for number, turn in enumerate(turns):
            with turn.enter() as entered:
                self._write(written[number], entered)
        self._say_read(flight)

    def _write(self, pairs: Sequence[tuple[Copy, Tensor]], buffers: Mapping[str, Tensor]) -> None:
        _copy([self._view(copy, buffers) for copy, _ in pairs], [part for _, part in pairs])

    def _arrive(self, flight: _InFlight) -> None:
        for work in flight.works:
            work.wait()
        for packet in flight.receives:
            if packet.place is not None and not packet.parts:
                self._find(packet, packet.place)

    def _find(self, packet: _Packet, place: Tensor) -> None:
        """A message in its sender's memory, at the same place in every run."""
        assert self._nearby is not None
        packet.flat = self._nearby.of[packet.message.peer][int(place) : int(place) + packet.message.nbytes]
        packet.parts = [self._part(copy, packet.flat) for copy in packet.message.copies]

    def _say_read(self, flight: _InFlight) -> None:
        """Their senders may pack the next bucket over the messages of this one."""
        if not flight.is_read:
            flight.is_read = True
            read = [packet for packet in flight.receives if packet.place is not None]
            tag = self._answer(flight.tag)
            operations = [dist.P2POp(dist.isend, self._notice(), packet.message.peer, tag=tag) for packet in read]
            self._unread[flight.bucket.index % self._depth] += _exchanged(operations)

    def _answer(self, tag: int) -> int:
        return 2 * len(self._plan.buckets) + tag

    def _notice(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def _drain(self) -> None:
        """Until all messages of this run are read."""
        for slot in range(self._depth):
            for work in self._unread[slot]:
                work.wait()
            self._unread[slot] = []

    def _settle(self, flight: _InFlight) -> None:
        """Wait until a bucket is off the wire, whatever became of it."""
        for work in flight.works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        with contextlib.suppress(RuntimeError):
            self._say_read(flight)

    def _stage(self, bucket: Bucket) -> _Staged:
        slot = bucket.index % self._depth
        sends, receives, sent, received = [], [], 0, 0
        for phase in bucket.phases:
            offsets, sent = self._lay_out(phase.sends, sent)
            sends.append([self._sent(*pair, slot, offsets) for pair in enumerate(phase.sends)])
            packets = []
            for message in phase.receives:
                packets.append(self._received(message, self._receive_buffers[slot][received:]))
                received += self._arriving_bytes(message)
            receives.append(packets)
        outgoing = [self._views(packet, self._sources) for packet in sends[0]]
        return _Staged(sends, receives, outgoing, [self._view(copy.source, self._sources) for copy in bucket.local])

    def _sent_bytes(self, bucket: Bucket) -> int:
        end = 0
        for phase in bucket.phases:
            _, end = self._lay_out(phase.sends, end)
        return end

    def _received_bytes(self, bucket: Bucket) -> int:
        return sum(self._arriving_bytes(message) for phase in bucket.phases for message in phase.receives)

    def _arriving_bytes(self, message: Message) -> int:
        return 0 if self._reads(message.peer) else _rounded(message.nbytes, self._alignment)

    def _reads(self, peer: int) -> bool:
        """Whether this rank reads messages of a peer in the peer's memory."""
        return self._nearby is not None and peer in self._nearby.of

    def _lay_out(self, messages: Sequence[Message], end: int) -> tuple[list[int], int]:
        """Where messages start, one behind the other from byte ``end``, and where they end. What several peers get is stored once."""
        offsets: list[int] = []
        for number, message in enumerate(messages):
            twin = next((k for k in range(number) if messages[k].copies == message.copies), None)
            offsets.append(end if twin is None else offsets[twin])
            if twin is None:
                end += _rounded(message.nbytes, self._alignment)
        return offsets, end

    def _sent(self, number: int, message: Message, slot: int, offsets: list[int]) -> _Packet:
        flat = self._send_buffers[slot][offsets[number] : offsets[number] + message.nbytes]
        is_first = offsets.index(offsets[number]) == number
        parts = [self._part(copy, flat) for copy in message.copies] if is_first else []
        place = None
        if self._nearby is not None and message.peer in self._nearby.readers:
            place = torch.tensor([sum(self._send_bytes[:slot]) + offsets[number]])
        return _Packet(message, flat, parts, place)

    def _received(self, message: Message, buffer: Tensor) -> _Packet:
        if self._reads(message.peer):
            return _Packet(message, buffer[:0], [], torch.zeros(1, dtype=torch.int64))
        flat = buffer[: message.nbytes]
        return _Packet(message, flat, [self._part(copy, flat) for copy in message.copies])

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


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _exchanged(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Many copies in one call; a dtype that differs is converted by the copy."""
    if to:
        torch._foreach_copy_(list(to), list(source))
