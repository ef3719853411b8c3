"""Transport messages between ranks: point to point through the process group, or by reading the sender's memory."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket, Message
from rlhf_mcore.bridge.run.endpoints import Destinations
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.joint_group import connect_device
from rlhf_mcore.platform import current_platform

Parcel = tuple[Tensor, int]  # a tensor, and the group rank at the other end
MAX_BATCH = 256  # messages per NCCL batch
_STAMP_BYTES = 64  # a stamp of 16 random bytes, and padding for alignment
_BOOT = Path("/proc/sys/kernel/random/boot_id")


# Waits for a message in flight. Callers must call it once.
Wait = Callable[[], object]


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """This rank's memory that peers can read, the peers' memory mapped here, and the ranks that can read this rank's memory."""

    own: Tensor  # [n] uint8
    of: dict[int, Tensor]  # by group rank
    readers: frozenset[int]


class Links(Protocol):
    """Messages and shared memory between the ranks of a plan. Ranks are numbered as in their group."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Wait]:
        """Start all sends and receives at once."""
        ...

    def share(self, nbytes: int, senders: Collection[int], device: torch.device) -> MappedMemory | None:
        """Share ``nbytes`` of memory with peers, and map the memory of ``senders`` if possible.

        Sent messages are packed in this memory. This is a collective call. Return None if sharing is not
        supported.
        """
        ...


class GroupLinks(Links):
    """Links over a process group. Building them is a collective call that connects the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        connect_device(group)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Wait]:
        """Start batches of at most MAX_BATCH messages.

        NCCL ignores tags and runs batches one after the other. All ranks cut their batches from one common order
        of all messages. So the first unfinished message is in the next batch on both ends, and it can complete.
        """
        group, rank = self._group, self._group.rank()
        ordered = [(peer, rank, flat) for flat, peer in receives] + [(rank, peer, flat) for flat, peer in sends]
        ordered.sort(key=lambda message: message[:2])
        operations = [
            dist.P2POp(dist.isend, flat, group=group, tag=tag, group_peer=receiver)
            if sender == rank
            else dist.P2POp(dist.irecv, flat, group=group, tag=tag, group_peer=sender)
            for sender, receiver, flat in ordered
        ]
        batches = [operations[first : first + MAX_BATCH] for first in range(0, len(operations), MAX_BATCH)]
        return [work.wait for batch in batches for work in dist.batch_isend_irecv(batch)]

    def share(self, nbytes: int, senders: Collection[int], device: torch.device) -> MappedMemory | None:
        return share_memory(nbytes, senders, self._group) if current_platform().is_host(device) else None


@dataclass(slots=True)
class Packet:
    """A message in memory: its bytes, and views of its rectangles.

    ``parts`` is empty if another packet packs the same bytes for another peer. It is also empty before the first
    arrival of a message that is read in shared memory.
    """

    message: Message
    flat: Tensor  # [nbytes] uint8
    parts: list[Tensor]


class Exchange(ABC):
    """The messages in flight of one phase of a bucket."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait until this rank's messages have been accepted and its peers' messages can be read.

        It may be called repeatedly.
        """
        ...

    @abstractmethod
    def release(self) -> None:
        """Free the received messages, which are no longer read. It may be called repeatedly."""
        ...

    @abstractmethod
    def settle(self) -> None:
        """Wait until peers have released this rank's messages, so that their memory can be reused."""
        ...


Views = Callable[[Message, Tensor], list[Tensor]]


@dataclass(slots=True)
class TransferBytes:
    """Message bytes of a run, as sent and as planned."""

    sent: int = 0
    received: int = 0
    planned_sent: int = 0
    planned_received: int = 0


class ChangedMessages(ABC):
    """Send phase-0 messages without the elements that receivers already hold (plug-in ``delta_sync``)."""

    moved: TransferBytes  # in the last run

    @abstractmethod
    def begin(self, destinations: Destinations, *, is_full: bool) -> None:
        """Start a run. ``is_full``: send everything; it must be equal on all ranks."""
        ...

    @abstractmethod
    def post(self, bucket: Bucket, sends: Sequence[Packet], receives: Sequence[Packet], views: Views) -> Exchange:
        """Start to exchange the packed messages of a bucket. ``views`` finds a message's rectangles in its bytes."""
        ...

    @abstractmethod
    def are_other(self, group: dist.ProcessGroup) -> bool:
        """Return whether any rank received a message that differs from its sender's.

        This is a collective call over the group.
        """
        ...


class PointToPoint:
    """Copy messages into receivers' buffers."""

    def __init__(self, links: Links):
        self._links = links

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        """Start an exchange. Both ends use the same tag, and each tag is used once per run."""
        out, into = ([(packet.flat, packet.message.peer) for packet in packets] for packets in (sends, receives))
        return _Copied(list(self._links.exchange(out, into, 2 * tag)))


@dataclass(slots=True)
class _Copied(Exchange):
    waits: list[Wait]

    def arrive(self) -> None:
        wait_for(self.waits)

    def release(self) -> None: ...

    def settle(self) -> None: ...


class SharedMemory:
    """Read messages in their senders' memory. Only offsets and acknowledgements are sent.

    Args:
        links: links between the ranks.
        memory: the memory for all packed sends.
        views: finds a message's rectangles in its bytes.
        otherwise: the transport for ranks that cannot read each other's memory.
    """

    def __init__(
        self,
        links: Links,
        memory: MappedMemory,
        views: Views,
        otherwise: PointToPoint,
    ):
        self.links, self._memory, self._views, self._otherwise = links, memory, views, otherwise

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        """Start an exchange, like :meth:`PointToPoint.post`."""
        near = [packet for packet in sends if packet.message.peer in self._memory.readers]
        read = [packet for packet in receives if packet.message.peer in self._memory.of]
        far_sends = [packet for packet in sends if packet.message.peer not in self._memory.readers]
        far_receives = [packet for packet in receives if packet.message.peer not in self._memory.of]
        far = self._otherwise.post(far_sends, far_receives, tag)
        origin = self._memory.own.data_ptr()
        offsets = [(torch.tensor([packet.flat.data_ptr() - origin]), packet.message.peer) for packet in near]
        places = [(torch.zeros(1, dtype=torch.int64), packet.message.peer) for packet in read]
        waits = self.links.exchange(offsets, places, 2 * tag)
        notices = self.links.exchange([], [(_notice(), packet.message.peer) for packet in near], 2 * tag + 1)
        return _Read(self, tag, far, list(waits), list(notices), read, [place for place, _ in places])

    def locate(self, packet: Packet, offset: int) -> None:
        """Find an arrived message in its sender's memory. Its place is the same in every run."""
        if not packet.parts:
            memory = self._memory.of[packet.message.peer]
            packet.flat = memory[offset : offset + packet.message.nbytes]
            packet.parts = self._views(packet.message, packet.flat)


@dataclass(slots=True)
class _Read(Exchange):
    transport: SharedMemory
    tag: int
    far: Exchange
    waits: list[Wait]
    notices: list[Wait]  # from peers and from this rank: messages have been read
    packets: list[Packet]
    offsets: list[Tensor]
    is_released: bool = field(default=False)

    def arrive(self) -> None:
        self.far.arrive()
        wait_for(self.waits)
        for packet, offset in zip(self.packets, self.offsets, strict=True):
            self.transport.locate(packet, int(offset))

    def release(self) -> None:
        self.far.release()
        if not self.is_released:
            self.is_released = True
            read = [(_notice(), packet.message.peer) for packet in self.packets]
            self.notices += self.transport.links.exchange(read, [], 2 * self.tag + 1)

    def settle(self) -> None:
        self.far.settle()
        wait_for(self.notices)


def wait_for(waits: list[Wait]) -> None:
    """Call each wait once, because gloo does not return from a second wait."""
    while waits:
        waits.pop(0)()


def _notice() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


# On a CPU, sending a byte through a socket costs ten times more than copying it. So ranks of one machine map
# memory.
def share_memory(nbytes: int, wanted: Collection[int], group: dist.ProcessGroup) -> MappedMemory:
    """Allocate ``nbytes`` for ranks of this machine to map, and map the memory of ``wanted`` if possible.

    This is a collective call. The memory has no name in the file system and no separate limit. It disappears with
    the processes that map it. A rank finds another rank's memory through the file descriptor in /proc, and checks
    a stamp in it. Ranks of other machines and processes with inaccessible /proc entries are left out.
    """
    stamp, size = os.urandom(16), _STAMP_BYTES + nbytes
    descriptor = os.memfd_create("rlhf_mcore", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
    own = torch.empty(size, dtype=torch.uint8)
    try:
        if descriptor is not None:
            os.ftruncate(descriptor, size)
            own = _map(f"/proc/self/fd/{descriptor}", size)
            own[:16] = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)
        every, rank = all_gather_json([machine(), os.getpid(), descriptor, size, stamp.hex()], group), group.rank()
        of = {peer: memory for peer in wanted if (memory := _of_rank(every[peer], every[rank][0])) is not None}
        readers = [peer for peer, ranks in enumerate(all_gather_json(sorted(of), group)) if rank in ranks]
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return MappedMemory(own[_STAMP_BYTES:], of, frozenset(readers))


def machine() -> str:
    """Return an identifier of this machine that is equal in all its containers, or "" if there is none."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _of_rank(described: tuple[str, int, int | None, int, str], machine: str) -> Tensor | None:
    where, process, descriptor, size, stamp = described
    path = f"/proc/{process}/fd/{descriptor}"
    if descriptor is None or where != machine or not machine:
        return None
    try:
        if os.stat(path).st_size != size:  # a process with the same number in another container
            return None
        memory = _map(path, size)
    except (OSError, RuntimeError):
        return None
    return memory[_STAMP_BYTES:] if bytes(memory[:16].tolist()).hex() == stamp else None


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
