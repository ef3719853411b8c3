"""Check plans for random tilings, replicas and nodes: a slow executor must leave exactly the right content, at the least cost.

The executor below does not know routes or cells. It moves bytes according to each rank's plan, and requires that both
ends agree.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.plan.build import Plan, build_plan
from rlhf_mcore.bridge.plan.rank_plan import Copy, RankPlan
from tests.plan_bytes import count_bytes, peak_bytes
from tests.trainer_layout import even_nodes
from tests.unit.bridge.geometry import bucket_names

MOST_RANKS = 12
TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def view_strided(buffer: np.ndarray, copy: Copy | Piece) -> np.ndarray:
    steps = tuple(stride * buffer.itemsize for stride in copy.strides)
    assert copy.offset + sum((n - 1) * s for n, s in zip(copy.shape, copy.strides, strict=True)) < buffer.size
    return np.lib.stride_tricks.as_strided(buffer[copy.offset :], copy.shape, steps)


@dataclass
class World:
    """Tensors, their sources and destinations, and the memory of all ranks."""

    full: dict[str, np.ndarray]
    sources: list[Place]
    destinations: list[Place]
    sizes: dict[str, int]
    held: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    wanted: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    filled: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def allocate(self) -> None:
        for place, memory in [(p, self.held) for p in self.sources] + [(p, self.wanted) for p in self.destinations]:
            for rank in place.ranks:
                buffer = np.zeros(place.numel, dtype=self.full[place.pieces[0].hf_name].dtype)
                for piece in place.pieces:
                    view_strided(buffer, piece)[...] = self.full[piece.hf_name][piece.slices]
                memory[rank, place.buffer] = buffer
        self.filled = {key: np.zeros_like(buffer) for key, buffer in self.wanted.items()}

    def ranks(self) -> list[int]:
        return sorted({rank for place in (*self.sources, *self.destinations) for rank in place.ranks})

    def masks(self, rank: int, places: list[Place]) -> dict[str, np.ndarray]:
        """Return the elements of each tensor that a rank has in some places."""
        masks = {name: np.zeros(tensor.shape, dtype=bool) for name, tensor in self.full.items()}
        for place in places:
            if rank in place.ranks:
                for piece in place.pieces:
                    masks[piece.hf_name][piece.slices] = True
        return masks

    def lower_bound(self, ranks: list[int]) -> int:
        """Return the number of bytes that some of these ranks need and none holds."""
        total = 0
        need = [self.masks(rank, self.destinations) for rank in ranks]
        have = [self.masks(rank, self.sources) for rank in ranks]
        for name, size in self.sizes.items():
            wanted = np.any([mask[name] for mask in need], axis=0)
            held = np.any([mask[name] for mask in have], axis=0)
            total += size * int((wanted & ~held).sum())
        return total


def execute(world: World, views: dict[int, RankPlan]) -> None:
    """Run all ranks bucket by bucket, phase by phase and message by message."""
    for index in range(len(next(iter(views.values())).buckets)):
        for rank, view in views.items():
            for copy in view.buckets[index].local:
                target = view_strided(world.filled[rank, copy.destination.buffer], copy.destination)
                target[...] = view_strided(world.held[rank, copy.source.buffer], copy.source)
        for phase in (0, 1):
            wire = pack(world, views, index, phase)
            for rank, view in views.items():
                for message in view.buckets[index].phases[phase].receives:
                    scatter(world, rank, message.copies, wire.pop((message.peer, rank)), message.nbytes)
            assert not wire, "messages that nobody takes"


def pack(world: World, views: dict[int, RankPlan], index: int, phase: int) -> dict[tuple[int, int], np.ndarray]:
    memory = world.filled if phase else world.held
    wire = {}
    for rank, view in views.items():
        for message in view.buckets[index].phases[phase].sends:
            assert message.peer != rank and (rank, message.peer) not in wire
            data = np.zeros(message.nbytes, dtype=np.uint8)
            covered = np.zeros(message.nbytes, dtype=int)
            for copy in message.copies:
                assert copy.message_offset % copy.item_bytes == 0
                part = slice(copy.message_offset, copy.message_offset + copy.nbytes)
                data[part] = (
                    np.ascontiguousarray(view_strided(memory[rank, copy.buffer], copy)).reshape(-1).view(np.uint8)
                )
                covered[part] += 1
            assert (covered == 1).all(), "a message has gaps or overlaps"
            wire[rank, message.peer] = data
    return wire


def scatter(world: World, rank: int, copies: list[Copy], data: np.ndarray, nbytes: int) -> None:
    assert data.nbytes == nbytes
    for copy in copies:
        part = data[copy.message_offset : copy.message_offset + copy.nbytes]
        target = view_strided(world.filled[rank, copy.buffer], copy)
        target[...] = part.view(target.dtype).reshape(copy.shape)


def tile(rng: random.Random, start: tuple[int, ...], shape: tuple[int, ...], cuts: int) -> list[tuple]:
    """Return a random guillotine tiling of a rectangle."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not cuts or not axes:
        return [(start, shape)]
    axis = rng.choice(axes)
    at = rng.randrange(1, shape[axis])
    split = rng.randrange(cuts)
    low = tile(rng, start, (*shape[:axis], at, *shape[axis + 1 :]), split)
    moved = (*start[:axis], start[axis] + at, *start[axis + 1 :])
    return low + tile(rng, moved, (*shape[:axis], shape[axis] - at, *shape[axis + 1 :]), cuts - 1 - split)


def place_of(rng: random.Random, buffer: str, rectangles: list[tuple], ranks: list[int]) -> Place:
    """Place rectangles in random order in one local tensor, some transposed in memory, with gaps between them."""
    pieces, padding, end = [], [], 0
    rng.shuffle(rectangles)
    for name, start, shape in rectangles:
        axes = list(range(len(shape)))
        if rng.random() < 0.3:
            rng.shuffle(axes)
        strides, step = [0] * len(shape), 1
        for axis in reversed(axes):
            strides[axis], step = step, step * shape[axis]
        pieces.append(Piece(name, start, shape, end, tuple(strides)))
        end += step
        if rng.random() < 0.3:
            padding.append((end, end + 2))
            end += 2
    return Place(buffer, tuple(pieces), tuple(sorted(ranks)), end, tuple(padding))


def random_side(rng: random.Random, world: World, prefix: str, num_ranks: int, whole: bool) -> list[Place]:
    """Return one side of a transfer. If not ``whole``, some rectangles are missing."""
    places = []
    for item_bytes in set(world.sizes.values()):
        by_owner: dict[tuple[int, ...], list[tuple]] = defaultdict(list)
        for name, tensor in world.full.items():
            if world.sizes[name] != item_bytes:
                continue
            for _ in range(rng.choice((1, 1, 2))):
                for start, shape in tile(rng, (0,) * tensor.ndim, tensor.shape, rng.randrange(5)):
                    owners = tuple(sorted(rng.sample(range(num_ranks), rng.randrange(1, num_ranks + 1))))
                    by_owner[owners].append((name, start, shape))
        for number, (owners, rectangles) in enumerate(by_owner.items()):
            kept = rectangles if whole else [r for r in rectangles if rng.random() < 0.9]
            if kept:
                places.append(place_of(rng, f"{prefix}{item_bytes}.{number}", kept, list(owners)))
    return places


def random_world(seed: int, max_ranks: int = 6) -> tuple[World, random.Random]:
    rng = random.Random(seed)
    data = np.random.default_rng(seed)
    full, sizes = {}, {}
    for number in range(rng.randrange(1, 5)):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.choice((1, 2, 2, 3))))
        item_bytes = rng.choice((1, 2, 4, 8))
        full[f"t{number}"] = data.integers(1, 250, shape).astype(TYPES[item_bytes])
        sizes[f"t{number}"] = item_bytes
    world = World(full, [], [], sizes)
    num_ranks = rng.randrange(1, max_ranks + 1)
    world.sources = random_side(rng, world, "s", num_ranks, whole=True)
    world.destinations = random_side(rng, world, "d", num_ranks, whole=False)
    world.allocate()
    return world, rng


def plan_of(world: World, bucket_bytes: int, nodes: list[int] | None) -> Plan:
    return build_plan(
        world.sources,
        world.destinations,
        element_sizes=world.sizes,
        bucket_bytes=bucket_bytes,
        nodes=nodes,
        order=list(world.full),
    )


def check(world: World, plan: Plan, nodes: list[int] | None) -> None:
    ranks = world.ranks()
    views = {rank: plan.rank_view(rank) for rank in ranks}
    execute(world, views)
    for key, expected in world.wanted.items():
        np.testing.assert_array_equal(world.filled[key], expected, err_msg=str(key))
    counted = count_bytes(plan)
    for rank, view in views.items():
        assert view.received_bytes == world.lower_bound([rank]) == counted.received[rank] == counted.lower_bound[rank]
        assert view.sent_bytes == counted.sent[rank]
        assert max((b.send_bytes for b in view.buckets), default=0) == counted.peak_sent[rank] <= plan.bucket_bytes
        assert (
            max((b.receive_bytes for b in view.buckets), default=0) == counted.peak_received[rank] <= plan.bucket_bytes
        )
        for depth in (1, 2, 3):
            assert peak_bytes(view, depth) <= counted.peak(depth) <= 2 * depth * plan.bucket_bytes
    each = nodes or list(range(MOST_RANKS))
    check_nodes(world, views, each)
    assert counted.imported.sum() == counted.exported.sum() == count_imported(views, each)
    for rank, view in views.items():
        assert counted.imported[rank] == count_imported({rank: view}, each)
        sent = [message for bucket in view.buckets for phase in bucket.phases for message in phase.sends]
        assert counted.exported[rank] == sum(message.nbytes for message in sent if each[message.peer] != each[rank])


def count_imported(views: dict[int, RankPlan], nodes: list[int]) -> int:
    return sum(
        message.nbytes
        for rank, view in views.items()
        for bucket in view.buckets
        for phase in bucket.phases
        for message in phase.receives
        if nodes[message.peer] != nodes[rank]
    )


def check_nodes(world: World, views: dict[int, RankPlan], nodes: list[int]) -> None:
    """Check that each node imports the bytes that its ranks need and do not hold, once."""
    for node in set(nodes):
        inside = [rank for rank in views if nodes[rank] == node]
        assert count_imported({rank: views[rank] for rank in inside}, nodes) == world.lower_bound(inside)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(("none", "even", "any")))
def test_any_two_tilings_arrive_whole_at_the_lower_bound(seed: int, kind: str) -> None:
    """Nodes have equal numbers of consecutive ranks, or random ranks."""
    world, rng = random_world(seed)
    nodes = None
    if kind != "none":
        nodes = even_nodes(MOST_RANKS, rng.choice((1, 2, 3, 8)))
    if kind == "any":
        rng.shuffle(nodes)
    check_coverage(world.sources, world.destinations, {name: full.shape for name, full in world.full.items()})
    for bucket_bytes in (rng.randrange(64, 128), rng.randrange(128, 512), 10**6):
        try:
            plan = plan_of(world, bucket_bytes, nodes)
        except ValueError as error:
            assert bucket_bytes < 128 and "bucket_bytes larger" in str(error)
            continue
        check(world, plan, nodes)


@pytest.mark.parametrize("nodes", [None, even_nodes(MOST_RANKS, 4), [0, 1, 2] * 4])
def test_many_replicas_and_tiny_buckets(nodes: list[int] | None) -> None:
    world, _ = random_world(7, max_ranks=MOST_RANKS)
    check(world, plan_of(world, 96, nodes), nodes)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tensors_travel_in_order_and_digests_tell_plans_apart(seed: int) -> None:
    world, _ = random_world(seed)
    plan = plan_of(world, 256, even_nodes(MOST_RANKS, 2))
    again = plan_of(world, 256, even_nodes(MOST_RANKS, 2))
    assert plan.digest == again.digest
    assert plan.digest != plan_of(world, 257, even_nodes(MOST_RANKS, 2)).digest
    assert plan.digest != plan_of(world, 256, even_nodes(MOST_RANKS, 3)).digest
    moved = [Place(p.buffer, p.pieces, (*p.ranks, MOST_RANKS - 1), p.numel, p.padding) for p in world.sources]
    world.sources = moved
    assert plan.digest != plan_of(world, 256, even_nodes(MOST_RANKS, 2)).digest
    assert {name for bucket in bucket_names(plan) for name in bucket} <= set(world.full)
    began: dict[str, int] = {}
    for number, bucket in enumerate(bucket_names(plan)):
        for name in bucket:
            began.setdefault(name, number)
    in_order = [began[name] for name in sorted(began, key=lambda name: int(name[1:]))]
    assert in_order == sorted(in_order)
