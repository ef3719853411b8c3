"""Build one rank's part of a sync from the common schedule: buckets of local copies and messages.

Both ends of a message visit the same units and cells in the same order, so they agree on its content by
construction. Phase 0 sends from source tensors. Phase 1 exists only with ``nodes``. It forwards data that phase 0
has written to destination tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from rlhf_mcore.bridge.map.pieces import Cell, Piece
from rlhf_mcore.bridge.plan.routes import RankRoute
from rlhf_mcore.bridge.plan.schedule import CellGroup, PlacedPieces, Schedule, Unit

DEPTH = 2  # buckets in flight


@dataclass(slots=True)
class Copy:
    """A rectangle in a message: ``hf_name[start : start + shape]``, in row-major order from byte ``message_offset``.

    On this rank the rectangle is in ``buffer`` at ``offset`` with ``strides`` (in elements). In a receive, two
    copies may read the same bytes of the message if the rank needs the rectangle twice.
    """

    hf_name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    buffer: str
    offset: int
    strides: tuple[int, ...]
    item_bytes: int
    message_offset: int

    @property
    def nbytes(self) -> int:
        return self.item_bytes * prod(self.shape)


@dataclass(slots=True)
class LocalCopy:
    """A rectangle copied from a source tensor to a destination tensor of the same rank (``message_offset`` is 0)."""

    source: Copy
    destination: Copy


@dataclass(slots=True)
class Message:
    """All data that this rank sends to one peer, or receives from it, in one phase of a bucket.

    Offsets are naturally aligned.
    """

    peer: int
    nbytes: int
    copies: list[Copy]


@dataclass(slots=True)
class Phase:
    """At most one message to and from each peer, in ascending order of peers. All may be in flight at once."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Bucket:
    """A bucket of one rank.

    If the rank has no part in a bucket, the bucket is empty, so all ranks use the same numbers.
    """

    index: int
    local: list[LocalCopy] = field(default_factory=list)
    phases: tuple[Phase, Phase] = field(default_factory=lambda: (Phase(), Phase()))

    @property
    def send_bytes(self) -> int:
        return sum(message.nbytes for phase in self.phases for message in phase.sends)

    @property
    def receive_bytes(self) -> int:
        return sum(message.nbytes for phase in self.phases for message in phase.receives)

    @property
    def source_buffers(self) -> set[str]:
        """This rank's source buffers that the bucket reads.

        Forwarded data is read from destination buffers, which are not included.
        """
        local = {copy.source.buffer for copy in self.local}
        return local | {copy.buffer for message in self.phases[0].sends for copy in message.copies}

    @property
    def destination_buffers(self) -> set[str]:
        """This rank's buffers that the bucket writes."""
        local = {copy.destination.buffer for copy in self.local}
        return local | {copy.buffer for phase in self.phases for message in phase.receives for copy in message.copies}


@dataclass(slots=True)
class RankPlan:
    """The buckets of one rank, in order."""

    rank: int
    buckets: list[Bucket]

    @property
    def sent_bytes(self) -> int:
        return sum(bucket.send_bytes for bucket in self.buckets)

    @property
    def received_bytes(self) -> int:
        return sum(bucket.receive_bytes for bucket in self.buckets)

    @property
    def local_bytes(self) -> int:
        return sum(copy.source.nbytes for bucket in self.buckets for copy in bucket.local)


@dataclass(slots=True)
class _OwnCell:
    """A cell of a pattern that this rank holds or needs. ``source`` and ``destinations`` number this rank's pieces."""

    cell: Cell
    group: CellGroup
    item_bytes: int
    number: int  # within the group
    route: RankRoute
    source: int | None
    destinations: list[int]


_Local = tuple[str, Piece]  # a buffer of this rank, and a piece in the buffer


class _BucketBuilder:
    """Collect one bucket's local copies, and its messages by peer for both phases."""

    def __init__(self, index: int):
        self._bucket = Bucket(index)
        self._sends: tuple[dict[int, Message], ...] = ({}, {})
        self._receives: tuple[dict[int, Message], ...] = ({}, {})

    def add(self, unit: Unit, own: _OwnCell) -> None:
        """Add this rank's part in one cell of a unit."""
        turn = own.group.first_turn + unit.number * len(own.group.cells) + own.number
        tensor, window = unit.tensor, unit.window
        needed = [_local(tensor.destinations, window.destinations[number]) for number in own.destinations]
        if own.source is not None:
            source_view = _local(tensor.sources, window.sources[own.source])
            _append(self._sends[0], own.route.receivers(turn), unit, own, source_view)
            for entry in needed:
                self._add_local(unit, own, source_view, entry)
        elif needed:
            source, phase = own.route.sender(turn)
            _append(self._receives[phase], (source,), unit, own, needed[0])
            message = self._receives[phase][source]
            for entry in needed[1:]:  # more places on this rank for the rectangle that was added last
                message.copies.append(_copy(unit, own, entry, message.nbytes - own.group.nbytes))
            _append(self._sends[1], own.route.forwarded_to(turn), unit, own, needed[0])

    def finish(self) -> Bucket:
        """Return the bucket with messages in ascending order of peers."""
        for phase, sends, receives in zip(self._bucket.phases, self._sends, self._receives, strict=True):
            phase.sends = [sends[peer] for peer in sorted(sends)]
            phase.receives = [receives[peer] for peer in sorted(receives)]
        return self._bucket

    def _add_local(self, unit: Unit, own: _OwnCell, held: _Local, needed: _Local) -> None:
        source, destination = _copy(unit, own, held, 0), _copy(unit, own, needed, 0)
        local = self._bucket.local
        if local and _adjoins(local[-1].source, source) and _adjoins(local[-1].destination, destination):
            last = local[-1]
            local[-1] = LocalCopy(_join(last.source, source), _join(last.destination, destination))
        else:
            local.append(LocalCopy(source, destination))


def build_rank_plan(schedule: Schedule, rank: int) -> RankPlan:
    """Build the plan of one rank. The time does not depend on the number of ranks of the same kind."""
    own_sets = schedule.sets.containing(rank)
    cells: dict[int, list[_OwnCell]] = {}
    routes: dict[int, RankRoute] = {}
    buckets = []
    for index, units in enumerate(schedule.buckets):
        builder = _BucketBuilder(index)
        for unit in units:
            if unit.pattern.sets.isdisjoint(own_sets):
                continue
            key = id(unit.pattern)
            if key not in cells:
                cells[key] = list(_own_cells(unit, own_sets, rank, routes))
            for own in cells[key]:
                builder.add(unit, own)
        buckets.append(builder.finish())
    return RankPlan(rank, buckets)


def _own_cells(unit: Unit, own_sets: frozenset[int], rank: int, routes: dict[int, RankRoute]) -> Iterator[_OwnCell]:
    tensor, window = unit.tensor, unit.window
    source_sets = [tensor.sources.sets[number] for number in window.sources]
    needed = [tensor.destinations.sets[number] for number in window.destinations]
    for group in unit.pattern.groups:
        if own_sets.isdisjoint(group.holder_sets) and own_sets.isdisjoint(group.needer_sets):
            continue
        if id(group.route) not in routes:
            routes[id(group.route)] = RankRoute(group.route, rank)
        route = routes[id(group.route)]
        for number, cell in enumerate(group.cells):
            source = next((n for n in cell.holders if source_sets[n] in own_sets), None)
            destinations = [n for n in cell.needers if needed[n] in own_sets]
            yield _OwnCell(cell, group, unit.pattern.item_bytes, number, route, source, destinations)


def _local(placed: PlacedPieces, number: int) -> _Local:
    return placed.buffers[number], placed.pieces[number]


def _append(messages: dict[int, Message], peers: Sequence[int], unit: Unit, own: _OwnCell, entry: _Local) -> None:
    """Append a rectangle to each peer's message, or extend the message's last copy if the rectangle continues it.

    Units of a bucket are sorted by descending element size (a power of two), so every offset is naturally aligned.
    Messages with the rectangle at the same offset share the copy.
    """
    new: Copy | None = None
    for peer in peers:
        message = messages.get(peer)
        if message is None:
            message = messages[peer] = Message(peer, 0, [])
        if new is None or new.message_offset != message.nbytes:
            new = _copy(unit, own, entry, message.nbytes)
        message.nbytes += own.group.nbytes
        last = message.copies[-1] if message.copies else None
        if last and _adjoins(last, new) and last.message_offset + last.nbytes == new.message_offset:
            message.copies[-1] = _join(last, new)
        else:
            message.copies.append(new)


def _adjoins(last: Copy, new: Copy) -> bool:
    """Return whether rectangles are neighbours along the first axis, in Hugging Face coordinates and in the local tensor."""
    return (
        last.hf_name == new.hf_name
        and len(new.shape) > 0
        and last.buffer == new.buffer
        and last.strides == new.strides
        and last.start[1:] == new.start[1:]
        and last.shape[1:] == new.shape[1:]
        and last.start[0] + last.shape[0] == new.start[0]
        and last.offset + last.shape[0] * last.strides[0] == new.offset
    )


def _join(last: Copy, new: Copy) -> Copy:
    return replace(last, shape=(last.shape[0] + new.shape[0], *last.shape[1:]))


def _copy(unit: Unit, own: _OwnCell, entry: _Local, message_offset: int) -> Copy:
    """Describe a cell's view in the piece that contains it."""
    buffer, piece = entry
    start, offset = own.cell.start, piece.offset
    if (origin := unit.window.start) is not None:
        start = tuple([a + b for a, b in zip(origin, start, strict=True)])
    if start != piece.start:
        offset += sum([(a - b) * stride for a, b, stride in zip(start, piece.start, piece.strides, strict=True)])
    shape, strides = own.cell.shape, piece.strides
    return Copy(unit.hf_name, start, shape, buffer, offset, strides, own.item_bytes, message_offset)
