"""Send only the elements that changed since the last sync, for links that are slower than a comparison.

A rank compares each element with its last sent value, bit for bit. A changed element is sent as its value and one byte, the number of
unchanged elements before it. The receiver already holds the other elements, in the tensors that it has written. If these are packed or
have another dtype, it keeps copies of the messages. Both ends hash the whole message, so the unchanged elements are compared too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.plan.rank_plan import Bucket, Message
from rlhf_mcore.bridge.run.endpoints import Destinations, KeptSources
from rlhf_mcore.bridge.run.execute import copy_parts, views_of_packet
from rlhf_mcore.bridge.run.transports import (
    ChangedMessages,
    Exchange,
    Links,
    Packet,
    Parcel,
    TransferBytes,
    Views,
    Wait,
    wait_for,
)
from rlhf_mcore.bridge.run.verify import piece_digest
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import current_platform

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FARTHEST = 256  # largest distance between two sent words, because one byte counts the words between them


def encode(new: Tensor, old: Tensor, itemsize: int) -> Tensor | None:
    """Encode the changes from ``old`` to ``new``, both uint8 [n], in words of ``itemsize`` bytes.

    Returns uint8 [m]: the changed words, then for each word the number of words between it and the previous sent word. In a longer
    run of equal words every 256th word is sent too. Returns None if the encoding is not shorter than ``new``.
    """
    words = new.view(_WORDS[itemsize])
    changed = (words != old.view(_WORDS[itemsize])).nonzero().view(-1)
    if len(changed) * (1 + itemsize) >= len(new):
        return None
    between = changed.diff(prepend=changed.new_full((1,), -1)) - 1
    ends = (between // _FARTHEST + 1).cumsum(0)
    codes = torch.full((int(ends[-1]) if len(ends) else 0,), _FARTHEST - 1, dtype=torch.uint8, device=new.device)
    codes[ends - 1] = (between % _FARTHEST).to(torch.uint8)
    encoded = torch.cat([words[_places(codes)].view(torch.uint8), codes])
    return encoded if len(encoded) < len(new) else None


def decode(encoded: Tensor, flat: Tensor, itemsize: int) -> None:
    """Apply the changes of :func:`encode` to ``flat``, uint8 [n], in place."""
    count = len(encoded) // (1 + itemsize)
    values, codes = encoded.split([count * itemsize, count])
    flat.view(_WORDS[itemsize])[_places(codes)] = values.view(_WORDS[itemsize])


def _places(codes: Tensor) -> Tensor:
    return (codes.to(torch.int64) + 1).cumsum(0) - 1


class Changes(ChangedMessages):
    """The transport of the first phase, for one executor. Messages that a machine forwards internally are sent whole.

    All ranks begin the same runs, so they agree without communication which runs send everything.

    Args:
        links: links between the ranks.
        previous: the last sent values; None on a rank that sends nothing.
        full_every: interval in runs at which everything is sent; the first run sends everything.
        device: device of the messages.
    """

    def __init__(self, links: Links, previous: KeptSources | None, full_every: int, device: torch.device) -> None:
        self._links, self._previous, self._full_every, self._device = links, previous, full_every, device
        self._runs = 0  # runs since everything was sent, including that run
        self._kept: dict[tuple[int, int], Tensor] = {}  # received messages, by bucket and peer
        self._written: Mapping[str, Tensor] = {}  # buffers from which messages can be read again, by name
        self.is_full, self.num_wrong, self.moved = True, 0, TransferBytes()

    def begin(self, destinations: Destinations, *, is_full: bool) -> None:
        """Begin a run. ``is_full``: send everything in this run. It must be the same on all ranks."""
        self._runs = 0 if is_full or self._runs >= self._full_every else self._runs
        self.is_full, self.num_wrong, self.moved = self._runs == 0, 0, TransferBytes()
        self._written = destinations.written()
        self._runs += 1

    def post(self, bucket: Bucket, sends: Sequence[Packet], receives: Sequence[Packet], views: Views) -> Exchange:
        """Start to exchange the packed messages of a bucket. ``views`` returns the rectangles of a message in its bytes."""
        self.moved.planned_sent += sum(packet.message.nbytes for packet in sends)
        self.moved.planned_received += sum(packet.message.nbytes for packet in receives)
        key = bucket.index
        if self.is_full:
            waits = self.exchange(
                [(packet.flat, packet.message.peer) for packet in sends],
                [(packet.flat, packet.message.peer) for packet in receives],
                key,
            )
            return _Arriving(self, key, waits, receives)
        bodies, heads = self._encode(bucket, sends, views)
        arriving = [torch.zeros(2, dtype=torch.int64, device=self._device) for _ in receives]
        peers = [packet.message.peer for packet in sends]
        places = [(head, packet.message.peer) for head, packet in zip(arriving, receives, strict=True)]
        waits = self.exchange(list(zip(heads, peers, strict=True)), places, key)
        return _Arriving(self, key, waits, receives, list(zip(bodies, peers, strict=True)), arriving)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], bucket: int, part: int = 0) -> list[Wait]:
        """Start to send and to receive. Empty messages are skipped, because the receiver knows that they are empty."""
        sends, receives = ([(flat, peer) for flat, peer in side if len(flat)] for side in (sends, receives))
        self.moved.sent += sum(flat.nbytes for flat, _ in sends)
        self.moved.received += sum(flat.nbytes for flat, _ in receives)
        return list(self._links.exchange(sends, receives, 4 * bucket + part))  # the second phase uses 4 * bucket + 2

    def are_other(self, group: dist.ProcessGroup) -> bool:
        """Return whether a decoded message differs from its sender's message on any rank. Collective over the group."""
        return not self.is_full and any(all_gather_json(self.num_wrong, group))

    def restore(self, bucket: int, packet: Packet) -> None:
        """Fill a message with the values that its receiver held before."""
        if self._is_readable(packet):
            copy_parts(packet.parts, views_of_packet(packet, self._written))
        else:
            packet.flat.copy_(self._kept[bucket, packet.message.peer])

    def keep(self, bucket: int, packet: Packet) -> None:
        """Keep a copy of a message if it cannot be read again from the tensors into which it is written."""
        if self._is_readable(packet):
            return
        key = bucket, packet.message.peer
        if key not in self._kept:
            self._kept[key] = current_platform().host_buffer(packet.message.nbytes)
        self._kept[key].copy_(packet.flat)

    def _is_readable(self, packet: Packet) -> bool:
        buffers = [self._written.get(copy.buffer) for copy in packet.message.copies]
        return all(
            flat is not None and flat.dtype == part.dtype for flat, part in zip(buffers, packet.parts, strict=True)
        )

    def _encode(self, bucket: Bucket, sends: Sequence[Packet], views: Views) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sent part and the head of each message. A head is int64 [2]: number of bytes, hash of the whole message."""
        bodies, heads = list[Tensor](), list[Tensor]()
        if not sends:
            return bodies, heads
        assert self._previous is not None, "who sends knows what it has sent"
        buffers = self._previous.open(bucket)
        for number, packet in enumerate(sends):
            if not packet.parts:  # shares the bytes of a message to another peer
                twin = next(k for k in range(number) if sends[k].flat.data_ptr() == packet.flat.data_ptr())
                bodies.append(bodies[twin])
                heads.append(heads[twin])
                continue
            old = torch.empty_like(packet.flat)
            copy_parts(views(packet.message, old), views_of_packet(packet, buffers))
            changed = encode(packet.flat, old, _itemsize(packet.message))
            bodies.append(packet.flat if changed is None else changed)
            size = torch.full((), len(bodies[-1]), dtype=torch.int64, device=self._device)
            heads.append(torch.stack([size, _digest(packet)]))
        self._previous.close(bucket)
        return bodies, heads


@dataclass(slots=True)
class _Arriving(Exchange):
    """Messages in flight: whole messages, or heads whose ``bodies`` follow."""

    changes: Changes
    bucket: int
    waits: list[Wait]
    receives: Sequence[Packet]
    bodies: list[Parcel] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    has_arrived: bool = False

    def arrive(self) -> None:
        if self.has_arrived:
            return
        self.has_arrived = True
        wait_for(self.waits)
        if not self.changes.is_full:
            self._receive_changes()
        for packet in self.receives:
            self.changes.keep(self.bucket, packet)

    def _receive_changes(self) -> None:
        heads: list[list[int]] = torch.stack(self.heads).tolist() if self.heads else []
        arriving = [
            packet.flat if size == packet.message.nbytes else packet.flat.new_empty(size)
            for packet, (size, _) in zip(self.receives, heads, strict=True)
        ]
        parcels = [(flat, packet.message.peer) for flat, packet in zip(arriving, self.receives, strict=True)]
        wait_for(self.changes.exchange(self.bodies, parcels, self.bucket, part=1))
        for packet, flat, (_, digest) in zip(self.receives, arriving, heads, strict=True):
            if flat is not packet.flat:
                self.changes.restore(self.bucket, packet)
                decode(flat, packet.flat, _itemsize(packet.message))
            self.changes.num_wrong += int(_digest(packet)) != digest

    def release(self) -> None: ...

    def settle(self) -> None: ...


def _itemsize(message: Message) -> int:
    return min(copy.item_bytes for copy in message.copies)


def _digest(packet: Packet) -> Tensor:
    """Hash the bytes of a message."""
    words = packet.flat.view(_WORDS[_itemsize(packet.message)])
    shape = (len(words),)
    return piece_digest(words, Piece("", (0,), shape, 0, (1,)), shape, words.dtype)
