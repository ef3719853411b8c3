"""What one rank does in a sync: buckets of local copies and messages, worked out from the common schedule without any other rank.

Both ends of a message walk the same units and cells in the same order, so they agree on its content by construction. Phase 0 sends
from source tensors; phase 1 (only where nodes are told apart) hands on from destination tensors what phase 0 has brought.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from rlhf_mcore.bridge.cells import Cell
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.routes import Actor
from rlhf_mcore.bridge.schedule import Deal, Entry, Pattern, Schedule, Unit


@dataclass(slots=True)
class Copy:
    """One rectangle of a message: ``hf_name[start : start + shape]`` in row-major order from byte ``message_offset``.

    On this rank it lies in ``buffer`` at ``offset`` with ``strides`` (elements). In a receive, two copies may read the same bytes of
    the message: the rank needs that rectangle twice.
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
    """One rectangle that goes from a source tensor straight to a destination tensor of the same rank (``message_offset`` is 0)."""

    source: Copy
    destination: Copy


@dataclass(slots=True)
class Message:
    """All that one peer gets from this rank, or this rank from it, in one phase of a bucket. Offsets are naturally aligned."""

    peer: int
    nbytes: int
    copies: list[Copy]


@dataclass(slots=True)
class Phase:
    """At most one message to and one from each peer, by ascending peer. All may be in flight at once."""

    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Bucket:
    """One bucket of one rank. A rank without a part in a bucket has it empty, so numbers agree between ranks."""

    index: int
    local: list[LocalCopy] = field(default_factory=list)
    phases: tuple[Phase, Phase] = field(default_factory=lambda: (Phase(), Phase()))

    @property
    def send_bytes(self) -> int:
        return sum(message.nbytes for phase in self.phases for message in phase.sends)

    @property
    def receive_bytes(self) -> int:
        return sum(message.nbytes for phase in self.phases for message in phase.receives)


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

    def peak_bytes(self, depth: int = 1) -> int:
        """Most bytes of send and receive buffers while ``depth`` consecutive buckets are in flight; at most 2 * depth * bucket."""
        sizes = [bucket.send_bytes + bucket.receive_bytes for bucket in self.buckets]
        return max((sum(sizes[i : i + depth]) for i in range(len(sizes))), default=0)


@dataclass(slots=True)
class _Part:
    """This rank's part in one cell of a pattern: which entries are its own."""

    cell: Cell
    deal: Deal
    number: int
    actor: Actor
    source: int | None
    destinations: list[int]


_Segment = tuple[Unit, Cell, list[Entry]]


class _BucketBuilder:
    """Collects one bucket's segments and lays them out."""

    def __init__(self, index: int):
        self._bucket = Bucket(index)
        self._sends: tuple[dict[int, list[_Segment]], ...] = (defaultdict(list), defaultdict(list))
        self._receives: tuple[dict[int, list[_Segment]], ...] = (defaultdict(list), defaultdict(list))

    def add(self, unit: Unit, part: _Part) -> None:
        """What this rank does with one cell of a unit."""
        cell, actor = part.cell, part.actor
        position = part.deal.base + unit.number * len(part.deal.cells) + part.number
        needed = [unit.destinations[number] for number in part.destinations]
        if part.source is not None:
            held = [unit.sources[part.source]]
            for target in actor.targets(position):
                self._sends[0][target].append((unit, cell, held))
            for entry in needed:
                self._add_local(unit, cell, held[0], entry)
        elif needed:
            source, phase = actor.source(position)
            self._receives[phase][source].append((unit, cell, needed))
            for target in actor.forwards(position):
                self._sends[1][target].append((unit, cell, needed[:1]))

    def finish(self) -> Bucket:
        """The bucket, laid out."""
        for number, phase in enumerate(self._bucket.phases):
            phase.sends = [_message(peer, self._sends[number][peer]) for peer in sorted(self._sends[number])]
            phase.receives = [_message(peer, self._receives[number][peer]) for peer in sorted(self._receives[number])]
        return self._bucket

    def _add_local(self, unit: Unit, cell: Cell, source: Entry, destination: Entry) -> None:
        new = LocalCopy(_copy(unit, cell, source, 0), _copy(unit, cell, destination, 0))
        if self._bucket.local:
            last = self._bucket.local[-1]
            if _continues(last.source, new.source) and _continues(last.destination, new.destination):
                _extend(last.source, new.source)
                _extend(last.destination, new.destination)
                return
        self._bucket.local.append(new)


def build_rank_plan(schedule: Schedule, rank: int) -> RankPlan:
    """The plan of one rank; takes no longer for more ranks of the same kind."""
    own_sets = schedule.sets.containing(rank)
    parts: dict[int, list[_Part]] = {}
    actors: dict[int, Actor] = {}
    buckets = []
    for index, units in enumerate(schedule.buckets):
        builder = _BucketBuilder(index)
        for unit in units:
            if unit.pattern.sets.isdisjoint(own_sets):
                continue
            key = id(unit.pattern)
            if key not in parts:
                parts[key] = list(_parts(unit, own_sets, rank, actors))
            for part in parts[key]:
                builder.add(unit, part)
        buckets.append(builder.finish())
    return RankPlan(rank, buckets)


def _parts(unit: Unit, own_sets: frozenset[int], rank: int, actors: dict[int, Actor]) -> Iterator[_Part]:
    pattern: Pattern = unit.pattern
    for deal in pattern.deals:
        if own_sets.isdisjoint(deal.holder_sets) and own_sets.isdisjoint(deal.needer_sets):
            continue
        if id(deal.route) not in actors:
            actors[id(deal.route)] = Actor(deal.route, rank)
        for number, cell in enumerate(deal.cells):
            source = next((n for n in cell.holders if unit.sources[n][0] in own_sets), None)
            destinations = [n for n in cell.needers if unit.destinations[n][0] in own_sets]
            yield _Part(cell, deal, number, actors[id(deal.route)], source, destinations)


def _message(peer: int, segments: list[_Segment]) -> Message:
    """Lays segments end to end, larger elements first: sizes are powers of two, so every offset is naturally aligned."""
    segments.sort(key=lambda segment: -segment[0].pattern.item_bytes)
    copies: list[Copy] = []
    end = 0
    for unit, cell, entries in segments:
        for entry in entries:
            _append(copies, _copy(unit, cell, entry, end))
        end += unit.pattern.item_bytes * cell.numel
    return Message(peer, end, copies)


def _append(copies: list[Copy], new: Copy) -> None:
    """Adds a copy, or lengthens the last one where the new one goes on."""
    if copies:
        last = copies[-1]
        if last.message_offset + last.nbytes == new.message_offset and _continues(last, new):
            _extend(last, new)
            return
    copies.append(new)


def _continues(last: Copy, new: Copy) -> bool:
    """Whether two copies are one: neighbours along the first axis, in Hugging Face coordinates and in the local tensor."""
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


def _extend(last: Copy, new: Copy) -> None:
    last.shape = (last.shape[0] + new.shape[0], *last.shape[1:])


def _copy(unit: Unit, cell: Cell, entry: Entry, message_offset: int) -> Copy:
    """A cell's view within the piece that contains it."""
    _, buffer, piece = entry
    start = tuple([a + b for a, b in zip(unit.start, cell.start, strict=True)])
    offset = _offset(piece, start)
    return Copy(unit.hf_name, start, cell.shape, buffer, offset, piece.strides, unit.pattern.item_bytes, message_offset)


def _offset(piece: Piece, start: tuple[int, ...]) -> int:
    if start == piece.start:
        return piece.offset
    return piece.offset + sum(
        [(a - b) * stride for a, b, stride in zip(start, piece.start, piece.strides, strict=True)]
    )
