"""Execute plans on four ranks in threads, over a wire that delivers as late as possible."""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece, Place, view
from rlhf_mcore.bridge.map.rules import adapter_names, blocks, hf_shapes, pieces
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run import transports
from rlhf_mcore.bridge.run.endpoints import Destinations, LiveSources
from rlhf_mcore.bridge.run.execute import Executor, Staging
from rlhf_mcore.bridge.run.merged import MergedSources, adapted_weights
from rlhf_mcore.bridge.run.transports import Links, MappedMemory, Parcel, Wait
from rlhf_mcore.geometry import AdapterSizes, GroupedSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.plan_bytes import count_bytes
from tests.trainer_layout import even_nodes, stage_names, trainer_places
from tests.unit.bridge.sources import Averages
from tests.unit.pairs import each_value, pairwise

RANKS, BUCKET = 4, 256
GEOMETRY = ModelGeometry("qwen3", 4, 4, GroupedSizes(4, 2, 2), 8, 16, False)
SHAPES = hf_shapes(GEOMETRY)
DTYPES = {name: torch.float64 if "norm" in name else torch.float32 for name in SHAPES}


class Wire(Links):
    """Pass messages between threads. The receiver reads the sender's buffer only when it waits, so a reused buffer shows."""

    def __init__(self, ranks_per_machine: int = 1) -> None:
        """Connect ranks. ``ranks_per_machine`` ranks read each other's memory; 0: no shared memory."""
        self._boxes: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)
        self._lock, self._here = threading.Lock(), threading.local()
        self._ranks_per_machine, self._meeting = ranks_per_machine, threading.Barrier(RANKS)
        self._memory: dict[int, tuple[Tensor, set[int]]] = {}

    def run(self, body: Callable[[int], None]) -> None:
        def enter(rank: int) -> None:
            self._here.rank = rank
            body(rank)

        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(enter, range(RANKS)))

    def share(self, nbytes: int, senders: Collection[int], device: torch.device) -> MappedMemory | None:
        if not self._ranks_per_machine or not current_platform().is_host(device):
            return None
        rank, size = self._here.rank, self._ranks_per_machine
        self._memory[rank] = (torch.zeros(nbytes, dtype=torch.uint8), set(senders))
        self._meeting.wait(120)
        near = {r for r in range(RANKS) if r // size == rank // size}
        of = {r: self._memory[r][0] for r in near if r in senders}
        return MappedMemory(self._memory[rank][0], of, frozenset(r for r in near if rank in self._memory[r][1]))

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> list[Wait]:
        waits: list[Wait] = []
        # Two ranks that first waited for their own sends would wait for each other.
        for tensor, peer in receives:
            box = self._box(peer, self._here.rank, tag)
            waits.append(partial(_receive, box, tensor))
        for tensor, peer in sends:
            arrived = threading.Event()
            self._box(self._here.rank, peer, tag).put((tensor, arrived))
            waits.append(partial(arrived.wait, 120))
        return waits

    def lose_messages(self) -> None:
        self._boxes.clear()

    def _box(self, sender: int, receiver: int, tag: int) -> queue.Queue[Any]:
        with self._lock:
            return self._boxes[sender, receiver, tag]


def _receive(box: queue.Queue[Any], tensor: Tensor) -> None:
    sent, arrived = box.get(timeout=120)
    assert sent.shape == tensor.shape
    tensor.copy_(sent)
    arrived.set()


@dataclass(slots=True)
class KeptBuffers(Destinations):
    """Destinations that always exist."""

    flats: dict[str, Tensor]
    fails_at: int = -1
    fails_in: str = "open"
    closed: list[int] = field(default_factory=list)

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        self.fail("open", bucket)
        return self.flats

    def close(self, bucket: Bucket) -> None:
        self.fail("close", bucket)
        self.closed.append(bucket.index)

    def fail(self, where: str, bucket: Bucket) -> None:
        if (bucket.index, where) == (self.fails_at, self.fails_in):
            raise OSError("no")


@cache
def source_places(tp: int, pp: int) -> list[Place]:
    layout = ParallelLayout(RANKS, tp=tp, pp=pp)
    return trainer_places(stage_names(GEOMETRY, layout), GEOMETRY, layout)


@cache
def destination_places(parts: int, buffers: int = 1) -> list[Place]:
    """Return the needed places. ``parts`` consecutive ranks split every matrix by columns, and each holds whole vectors.

    Names are distributed over the buffers.
    """
    places = []
    for part in range(parts):
        for buffer in range(buffers):
            pieces, offset = [], 0
            for name, shape in list(SHAPES.items())[buffer::buffers]:
                width = shape[-1] // parts if len(shape) == 2 else shape[-1]
                start = (0, part * width) if len(shape) == 2 else (0,)
                cut = (*shape[:-1], width)
                pieces.append(Piece(name, start, cut, offset, (width, 1)[-len(shape) :]))
                offset += torch.Size(cut).numel()
            places.append(Place(f"part{part}.{buffer}", tuple(pieces), tuple(range(part, RANKS, parts)), offset))
    return places


def tensors_of(places: list[Place], rank: int) -> dict[str, Tensor]:
    """Return this rank's empty buffers. float64 represents both dtypes of the wire exactly."""
    sizes = {place.buffer: sum(piece.numel for piece in place.pieces) for place in places if rank in place.ranks}
    # A source buffer holds one tensor and has its dtype. A destination buffer of several tensors has the widest dtype.
    kinds = {place.buffer: {DTYPES[piece.hf_name] for piece in place.pieces} for place in places if rank in place.ranks}
    return {
        name: torch.zeros(size, dtype=kinds[name].pop() if len(kinds[name]) == 1 else torch.float64)
        for name, size in sizes.items()
    }


def spread(flats: dict[str, Tensor], places: list[Place], rank: int, full: Mapping[str, Tensor]) -> None:
    for place in places:
        for piece in place.pieces if rank in place.ranks else ():
            flats[place.buffer].as_strided(piece.shape, piece.strides, piece.offset).copy_(
                full[piece.hf_name][piece.slices]
            )


@cache  # four ranks need it
def random_model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(DTYPES[name]) for name, shape in SHAPES.items()}


def make_plan(sources: list[Place], destinations: list[Place], per_node: int | None) -> Plan:
    return build_plan(
        sources,
        destinations,
        element_sizes={name: dtype.itemsize for name, dtype in DTYPES.items()},
        bucket_bytes=BUCKET,
        order=spread_order(list(SHAPES), sources, keep_layers=False),
        nodes=per_node and even_nodes(4, per_node),
    )


@cache
def plan_transfer(tp: int, pp: int, parts: int, per_node: int | None) -> Plan:
    return make_plan(source_places(tp, pp), destination_places(parts), per_node)


CASES = [
    (2, 2, 1, None),
    (2, 2, 2, None),
    (4, 1, 1, None),
    (1, 4, 4, None),
    (2, 2, 1, 2),
    (1, 4, 1, 2),
    (1, 1, 2, None),
]


@pytest.fixture(params=["host", "device"])
def on_host(request: pytest.FixtureRequest) -> bool:
    """Return whether ranks hold tensors on the host, readable by other ranks, or on separate devices."""
    if request.param == "device":
        request.getfixturevalue("late_cuda")
    return bool(request.param == "host")


@each_value(
    ("machine", [0, 1, 2, 4]),
    ("tp, pp, parts, per_node", list(CASES)),
)
def test_every_run_brings_what_the_sources_hold_then(
    tp: int, pp: int, parts: int, per_node: int | None, machine: int, on_host: bool
) -> None:
    wire = Wire(machine)
    sources, destinations, plan = (
        source_places(tp, pp),
        destination_places(parts),
        plan_transfer(tp, pp, parts, per_node),
    )
    # Buffers are reused, unless every rank holds all tensors.
    assert plan.num_buckets > 2 or not count_bytes(plan).received.any()

    def rank_body(rank: int) -> None:
        mine, received = tensors_of(sources, rank), KeptBuffers(tensors_of(destinations, rank))
        executor = Executor(plan.rank_view(rank), LiveSources(mine), DTYPES, wire)
        for seed in range(3):
            full = random_model(seed)
            spread(mine, sources, rank, full)
            executor.run(received)
            expected = tensors_of(destinations, rank)
            spread(expected, destinations, rank, full)
            assert all(torch.equal(received.flats[name], tensor) for name, tensor in expected.items())
            assert received.closed == list(range(plan.num_buckets)) * (seed + 1)
        assert executor.peak_bytes <= (2 if machine == RANKS and on_host else 4) * BUCKET
        staged = executor._staging._sends, executor._staging._receives
        assert bool(any(map(len, staged))) is on_host, "memory of a device belongs to others between two runs"

    wire.run(rank_body)


def test_what_goes_to_several_peers_is_packed_once() -> None:
    plan = make_plan(source_places(4, 1), destination_places(1), None)
    staging = Staging(plan.rank_view(0), DTYPES, 2, torch.device("cpu"))
    largest = max(plan.rank_view(0).buckets, key=lambda bucket: bucket.send_bytes)
    [packets, _] = staging.stage(largest).sends
    assert len(packets) == 3 and len({packet.flat.data_ptr() for packet in packets}) == 1
    assert [len(packet.parts) > 0 for packet in packets] == [True, False, False]
    assert staging.send_bytes <= 2 * packets[0].message.nbytes


@pairwise(
    ("fails_at, fails_in", [(0, "open"), (0, "close"), (2, "open"), (2, "close")]),
    ("per_node", [None, 2]),
    ("machine", [0, 2, 4]),
)
def test_a_run_after_one_that_failed_is_whole(machine: int, per_node: int | None, fails_at: int, fails_in: str) -> None:
    wire = Wire(machine)
    sources, destinations, plan = source_places(2, 2), destination_places(1), plan_transfer(2, 2, 1, per_node)
    old, new = random_model(0), random_model(1)
    bodies: dict[int, tuple[dict[str, Tensor], KeptBuffers, Executor]] = {}

    def failing(rank: int) -> None:
        mine, received = tensors_of(sources, rank), KeptBuffers(tensors_of(destinations, rank))
        executor = Executor(plan.rank_view(rank), LiveSources(mine), DTYPES, wire)
        bodies[rank] = (mine, received, executor)
        spread(mine, sources, rank, old)
        executor.run(received)
        received.fails_at, received.fails_in = fails_at, fails_in
        with pytest.raises(OSError, match="no"):
            executor.run(received)

    wire.run(failing)
    wire.lose_messages()  # messages in transit are lost

    def whole(rank: int) -> None:
        mine, received, executor = bodies[rank]
        received.fails_at = -1
        spread(mine, sources, rank, new)
        executor.run(received)
        expected = tensors_of(destinations, rank)
        spread(expected, destinations, rank, new)
        assert all(torch.equal(received.flats[name], tensor) for name, tensor in expected.items())

    wire.run(whole)


@pytest.mark.parametrize("machine", [0, 4])
@pytest.mark.parametrize(("tp", "pp", "parts", "per_node"), CASES)
def test_sources_may_be_made_bucket_by_bucket(tp: int, pp: int, parts: int, per_node: int | None, machine: int) -> None:
    wire, sources, destinations = Wire(machine), source_places(tp, pp), destination_places(parts)
    plan = plan_transfer(tp, pp, parts, per_node)

    def rank_body(rank: int) -> None:
        mine = [tensors_of(sources, rank), tensors_of(sources, rank)]
        averages, received = Averages(*mine), KeptBuffers(tensors_of(destinations, rank))
        executor = Executor(plan.rank_view(rank), averages, DTYPES, wire)
        for seed in (0, 2):
            models = [random_model(seed + k) for k in range(2)]
            for flats, model in zip(mine, models, strict=True):
                spread(flats, sources, rank, model)
            executor.run(received)
            mean = {name: (models[0][name] + models[1][name]) / 2 for name in SHAPES}
            expected = tensors_of(destinations, rank)
            spread(expected, destinations, rank, mean)
            assert all(torch.equal(received.flats[name], tensor) for name, tensor in expected.items())
            assert not averages.open_buckets and averages.most_open <= 2

    wire.run(rank_body)


@pytest.mark.parametrize(("tp", "pp", "parts", "per_node"), CASES)
def test_adapters_are_merged_where_their_matrices_are(tp: int, pp: int, parts: int, per_node: int | None) -> None:
    """Each rank merges its parts of W, A and B. Engines get parts of the sum of the whole matrices."""
    wire, sources, destinations = Wire(0), source_places(tp, pp), destination_places(parts)
    plan, weights, generator = plan_transfer(tp, pp, parts, per_node), random_model(0), torch.Generator().manual_seed(1)
    layout = ParallelLayout(RANKS, tp=tp, pp=pp)
    of_adapters = replace(GEOMETRY, adapter=AdapterSizes(2, 1.0, ("q_proj", "v_proj", "o_proj", "up_proj")))
    # Integers, so that a product of parts equals the part of the product bit for bit.
    adapters = {
        name: torch.randint(-3, 4, shape, generator=generator).float() for name, shape in hf_shapes(of_adapters).items()
    }
    whole = dict(weights)
    for name in adapted_weights(of_adapters):
        a, b = (adapters[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"] for side in "AB")
        whole[name] = weights[name] + 0.5 * b @ a
    assert len(adapters) == 2 * 4 * GEOMETRY.num_layers

    def rank_body(rank: int) -> None:
        mine, received = tensors_of(sources, rank), KeptBuffers(tensors_of(destinations, rank))
        spread(mine, sources, rank, weights)
        parameters, factors = [], []
        for name, flat in mine.items():
            shard = layout.shard_of(name, rank)
            rows = {"linear_qkv": 8 * 2, "linear_fc1": 2 * 8}.get(name.split(".")[-2], 4 if ".linear_" in name else 1)
            rows = rows // tp if rows > 4 else rows
            parameters.append(LocalParameter(name, flat.view(rows, -1), shard))
            if blocks(name, of_adapters, shard):
                for adapter in adapter_names(name):
                    pieces_of = pieces(adapter, of_adapters, shard)
                    tensor = torch.full((sum(piece.numel for piece in pieces_of),), torch.nan)
                    for piece in pieces_of:
                        view(tensor, piece).copy_(adapters[piece.hf_name][piece.slices])
                    shape = (-1, 2) if adapter.endswith("_b") else (-1, parameters[-1].tensor.shape[1])
                    factors.append(LocalParameter(adapter, tensor.view(shape), shard))
        merged = MergedSources(parameters, factors, of_adapters)
        Executor(plan.rank_view(rank), merged, DTYPES, wire).run(received)
        expected = tensors_of(destinations, rank)
        spread(expected, destinations, rank, whole)
        assert all(torch.equal(received.flats[name], tensor) for name, tensor in expected.items())
        assert not merged._opened, "the memory of a bucket is released when it was sent"

    wire.run(rank_body)


def test_sources_are_closed_after_a_failure() -> None:
    wire, sources, destinations = Wire(0), source_places(1, 1), destination_places(1)
    plan = make_plan(sources, destinations, None)

    def rank_body(rank: int) -> None:
        mine = tensors_of(sources, rank)
        averages, received = Averages(mine, mine), KeptBuffers(tensors_of(destinations, rank), fails_at=0)
        with pytest.raises(OSError, match="no"):
            Executor(plan.rank_view(rank), averages, DTYPES, wire).run(received)
        assert not averages.open_buckets and averages.most_open > 0

    wire.run(rank_body)


def test_a_peer_that_dies_while_memory_is_shared_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge to remote engines is rebuilt whenever engines join or leave."""

    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(transports, "all_gather_json", lost)
    held = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match="closed by peer"):
        transports.share_memory(1000, [1], SimpleNamespace())  # type: ignore[arg-type]
    assert os.listdir("/proc/self/fd") == held
