"""Allocate memory for messages, and find each message's rectangles in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket, Message, RankPlan
from rlhf_mcore.bridge.run.transports import MappedMemory, Packet


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
