"""Ways of a message from one rank to another: point to point through the process group, or read where its sender has packed it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Message
from rlhf_mcore.bridge.run.shared_memory import MappedMemory, share_memory

Parcel = tuple[Tensor, int]  # a tensor, and the group rank that it goes to or comes from


class Work(Protocol):
    """Something under way."""

    def wait(self) -> object: ...


class Links(Protocol):
    """What transports need of the ranks of a plan, which are numbered as in their group."""

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Work]:
        """Start to send and to receive, all at once."""
        ...

    def share(self, nbytes: int, senders: Collection[int]) -> MappedMemory | None:
        """Memory of ``nbytes`` that peers can read, and that of ``senders`` where this rank can. Collective; None: not at all."""
        ...


@dataclass(frozen=True, slots=True)
class GroupLinks(Links):
    """The ranks of a process group."""

    group: dist.ProcessGroup

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Work]:
        """Receives come first, so that no send waits for its peer to be ready."""
        group = self.group
        operations = [dist.P2POp(dist.irecv, flat, group=group, tag=tag, group_peer=peer) for flat, peer in receives]
        operations += [dist.P2POp(dist.isend, flat, group=group, tag=tag, group_peer=peer) for flat, peer in sends]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works

    def share(self, nbytes: int, senders: Collection[int]) -> MappedMemory | None:
        return share_memory(nbytes, senders, self.group)


@dataclass(slots=True)
class Packet:
    """A message in memory: its bytes, and its rectangles in them.

    There are no ``parts`` to be packed where another peer gets the same bytes, and none yet in what is read in shared memory until
    the message has arrived for the first time.
    """

    message: Message
    flat: Tensor  # [nbytes] uint8
    parts: list[Tensor]


class Exchange(Protocol):
    """The messages of one phase of a bucket, under way."""

    def arrive(self) -> None:
        """Wait until this rank's messages have been taken and those of its peers can be read. It may be called again."""
        ...

    def release(self) -> None:
        """What has arrived is not read any more. It may be called again."""
        ...

    def settle(self) -> None:
        """Wait until peers have released what this rank has sent: its memory may be packed again."""
        ...


class Transport(Protocol):
    """Brings packed messages to peers and peers' messages here."""

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        """Start an exchange. Tags are the same on both ends, and each is used once in a run."""
        ...


class PointToPoint(Transport):
    """Messages are copied into receivers' buffers."""

    def __init__(self, links: Links):
        self._links = links

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        out, into = ([(packet.flat, packet.message.peer) for packet in packets] for packets in (sends, receives))
        return _Copied(list(self._links.exchange(out, into, 2 * tag)))


@dataclass(slots=True)
class _Copied(Exchange):
    works: list[Work]

    def arrive(self) -> None:
        _wait(self.works)

    def release(self) -> None: ...

    def settle(self) -> None: ...


class SharedMemory(Transport):
    """Messages are read where their senders have packed them; only where that is, and that it was read, travels.

    Args:
        links: between the ranks.
        memory: in which all sends are packed.
        views: of the rectangles of a message in its bytes.
        otherwise: the transport to and from ranks that do not read each other's memory.
    """

    def __init__(
        self, links: Links, memory: MappedMemory, views: Callable[[Message, Tensor], list[Tensor]], otherwise: Transport
    ):
        self.links, self._memory, self._views, self._otherwise = links, memory, views, otherwise

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet], tag: int) -> Exchange:
        near = [packet for packet in sends if packet.message.peer in self._memory.readers]
        read = [packet for packet in receives if packet.message.peer in self._memory.of]
        far_sends = [packet for packet in sends if packet.message.peer not in self._memory.readers]
        far_receives = [packet for packet in receives if packet.message.peer not in self._memory.of]
        far = self._otherwise.post(far_sends, far_receives, tag)
        origin = self._memory.own.data_ptr()
        offsets = [(torch.tensor([packet.flat.data_ptr() - origin]), packet.message.peer) for packet in near]
        found = [(torch.zeros(1, dtype=torch.int64), packet.message.peer) for packet in read]
        works = self.links.exchange(offsets, found, 2 * tag)
        notices = self.links.exchange([], [(_notice(), packet.message.peer) for packet in near], 2 * tag + 1)
        return _Read(self, tag, far, list(works), list(notices), read, [place for place, _ in found])

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
    works: list[Work]
    notices: list[Work]  # that messages have been read, by peers and by this rank
    packets: list[Packet]
    offsets: list[Tensor]
    is_released: bool = field(default=False)

    def arrive(self) -> None:
        self.far.arrive()
        _wait(self.works)
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
        _wait(self.notices)


def _wait(works: list[Work]) -> None:
    """For each once: gloo does not return from a second wait."""
    while works:
        works.pop(0).wait()


def _notice() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
