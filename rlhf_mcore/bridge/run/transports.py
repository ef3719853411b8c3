"""Ways of a message from one rank to another: point to point through the process group, or read where its sender has packed it."""

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
MAX_BATCH = 256  # messages that NCCL takes at a time
_STAMP_BYTES = 64  # a stamp of 16 random bytes, and padding that aligns the rest
_BOOT = Path("/proc/sys/kernel/random/boot_id")


# Waits for a message that is under way. It is called once.
Wait = Callable[[], object]


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """Bytes of this rank for others to read, bytes of others for this rank, and the ranks that can read its own."""

    own: Tensor  # [n] uint8
    of: dict[int, Tensor]  # by group rank
    readers: frozenset[int]


class Links(Protocol):
    """The messages and the memory that transports need between the ranks of a plan, numbered as in their group."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Wait]:
        """Start to send and to receive, all at once."""
        ...

    def share(self, nbytes: int, senders: Collection[int], device: torch.device) -> MappedMemory | None:
        """Share ``nbytes`` of memory with peers, and map that of ``senders`` where possible. Collective; None: not at all.

        What is sent is then packed there.
        """
        ...


class GroupLinks(Links):
    """The ranks of a process group. They are made by all of them together, and connected then."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        connect_device(group)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Wait]:
        """Start batches of at most MAX_BATCH messages.

        NCCL looks at no tags and carries out one batch after the other. All ranks cut theirs from one order of all messages, so
        the first message that is not done is in the next batch of both its ends, and is carried out.
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
    """A message in memory: its bytes, and its rectangles in them.

    There are no ``parts`` to be packed where another peer gets the same bytes, and none yet in what is read in shared memory until
    the message has arrived for the first time.
    """

    message: Message
    flat: Tensor  # [nbytes] uint8
    parts: list[Tensor]


class Exchange(ABC):
    """The messages of one phase of a bucket, under way."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait until this rank's messages have been taken and those of its peers can be read. It may be called again."""
        ...

    @abstractmethod
    def release(self) -> None:
        """Free what has arrived: it is not read any more. It may be called again."""
        ...

    @abstractmethod
    def settle(self) -> None:
        """Wait until peers have released what this rank has sent: its memory may be packed again."""
        ...


Views = Callable[[Message, Tensor], list[Tensor]]


@dataclass(slots=True)
class TransferBytes:
    """Bytes of messages of a run, as they were sent and as they were planned."""

    sent: int = 0
    received: int = 0
    planned_sent: int = 0
    planned_received: int = 0


class ChangedMessages(ABC):
    """Messages of first phases without the elements that their receivers already hold: the plug-in ``delta_sync``."""

    moved: TransferBytes  # in the last run

    @abstractmethod
    def begin(self, destinations: Destinations, *, is_full: bool) -> None:
        """Begin a run. ``is_full``: it sends everything; the same on all ranks."""
        ...

    @abstractmethod
    def post(self, bucket: Bucket, sends: Sequence[Packet], receives: Sequence[Packet], views: Views) -> Exchange:
        """Start to exchange the packed messages of a bucket. ``views`` finds the rectangles of a message in its bytes."""
        ...

    @abstractmethod
    def are_other(self, group: dist.ProcessGroup) -> bool:
        """Return whether any rank has received a message that differs from its sender's. Collective over the group."""
        ...


class PointToPoint:
    """Copies messages into receivers' buffers."""

    def __init__(self, links: Links):
        self._links = links

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        """Start an exchange. Tags are the same on both ends, and each is used once in a run."""
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
    """Reads messages where their senders have packed them. Only places and acknowledgements travel.

    Args:
        links: between the ranks.
        memory: in which all sends are packed.
        views: of the rectangles of a message in its bytes.
        otherwise: the transport to and from ranks that do not read each other's memory.
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
        """Start an exchange, as :meth:`PointToPoint.post`."""
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
        """Find an arrived message in its sender's memory. It is at the same place in every run."""
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
    notices: list[Wait]  # that messages have been read, by peers and by this rank
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
    """Call each once: gloo does not return from a second wait."""
    while waits:
        waits.pop(0)()


def _notice() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


# On a CPU a byte costs ten times more through a socket than to copy, so the ranks of one machine map each other's memory.
def share_memory(nbytes: int, wanted: Collection[int], group: dist.ProcessGroup) -> MappedMemory:
    """Allocate ``nbytes`` for ranks of this machine to map, and map those of ``wanted`` where possible. Collective.

    The memory has no name in the file system and no limit of its own, and is gone with the processes that have it mapped. Another
    rank is found through its file descriptor in /proc; a stamp in the memory tells whether it is the right one. Ranks of other
    machines, and those whose processes must not be looked at, are left out.
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
    """Name this machine, the same in all its containers; "" where it has no name."""
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
        if os.stat(path).st_size != size:  # a process of the same number in another container
            return None
        memory = _map(path, size)
    except (OSError, RuntimeError):
        return None
    return memory[_STAMP_BYTES:] if bytes(memory[:16].tolist()).hex() == stamp else None


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
