"""Simulate plans for real geometries and layouts with up to 16,384 ranks: coverage, lower bound, balance, agreement of peers."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from benchmarks.bridge_bytes import lower_bound
from benchmarks.models import LLAMA_70B, QWEN_235B, Model, destinations, shapes, sources, trainer_layout
from rlhf_mcore.bridge.map.coverage import CoverageError, check_coverage
from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.bridge.plan.rank_plan import Copy, RankPlan
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.readers.model_files import read_geometry
from tests.commands import ROOT
from tests.engine_layout import destinations as engine_destinations
from tests.plan_bytes import count_bytes, peak_bytes
from tests.trainer_layout import even_nodes, stage_names, trainer_places
from tests.unit.bridge.geometry import bucket_names

BUCKET = 256 * 2**20


def shallow(model: Model, layers: int, experts: int = 0) -> Model:
    """Return the model with fewer layers and experts and the same widths. Repeated layers would test nothing new."""
    fewer = replace(model.geometry.experts, count=experts) if model.geometry.experts is not None else None
    return replace(model, geometry=replace(model.geometry, num_layers=layers, experts=fewer))


DENSE = shallow(LLAMA_70B, 8)
MOE = shallow(QWEN_235B, 8, experts=8)
DEEPSEEK_V3, GPT_OSS = (
    Model(name, read_geometry(f"{ROOT}/configs/models/{name}", "lm")) for name in ("DeepSeek-V3", "gpt-oss-120b")
)
# model, ranks, trainer tp, pp, ep, engine tp
LAYOUTS = [
    (DENSE, 4, 2, 2, 1, 2),
    (DENSE, 4, 1, 4, 1, 4),
    (DENSE, 24, 4, 2, 1, 8),
    (DENSE, 16384, 8, 8, 1, 8),
    (MOE, 64, 4, 2, 8, 8),
    pytest.param(shallow(QWEN_235B, 2, experts=512), 16384, 8, 2, 8, 8, marks=pytest.mark.full),
    (shallow(DEEPSEEK_V3, 4, experts=32), 2048, 8, 2, 32, 16),  # latent attention, three dense layers, a shared expert
    (shallow(GPT_OSS, 4, experts=32), 64, 4, 2, 8, 8),  # a layer's experts in one tensor, stored transposed
    pytest.param(DEEPSEEK_V3, 2048, 8, 16, 32, 16, marks=pytest.mark.full),
]


def build_places(
    model: Model, ranks: int, tp: int, pp: int, ep: int, engine_tp: int
) -> tuple[list[Place], list[Place]]:
    held = sources(model, trainer_layout(model, ranks, tp, pp, ep))
    return held, destinations(model, engine_tp, ranks // engine_tp)


def plan_of(model: Model, held: list[Place], needed: list[Place], nodes: list[int] | int | None = 8) -> Plan:
    """Plan a sync. ``nodes``: the node of every rank, or the number of ranks per node."""
    names = list(shapes(model))
    size = 1 + max(place.ranks[-1] for place in (*held, *needed))
    return build_plan(
        held,
        needed,
        element_sizes=dict.fromkeys(names, 2),
        bucket_bytes=BUCKET,
        order=spread_order(names, held),
        nodes=even_nodes(size, nodes) if isinstance(nodes, int) else nodes,
    )


@pytest.mark.parametrize(("model", "ranks", "tp", "pp", "ep", "engine_tp"), LAYOUTS)
def test_every_layout_is_covered_at_the_lower_bound(
    model: Model, ranks: int, tp: int, pp: int, ep: int, engine_tp: int
) -> None:
    check_bound(model, ranks, *build_places(model, ranks, tp, pp, ep, engine_tp))


@pytest.mark.parametrize(
    ("model", "ranks", "grid"),
    [
        (MOE, 64, EngineGrid(8, ep=8)),
        (MOE, 64, EngineGrid(2, pp=2, dp=4, ep=8)),
        (shallow(DEEPSEEK_V3, 4, experts=32), 2048, EngineGrid(2, dp=16, ep=32)),
        (shallow(GPT_OSS, 4, experts=32), 64, EngineGrid(4, dp=2, ep=8)),
        (shallow(QWEN_235B, 2, experts=512), 16384, EngineGrid(8, ep=8)),
        (DENSE, 16384, EngineGrid(8, pp=2)),
        pytest.param(QWEN_235B, 16384, EngineGrid(4, pp=2, dp=4, ep=16), marks=pytest.mark.full),
    ],
    ids=lambda part: str(getattr(part, "name", part)),
)
def test_every_grid_of_engines_is_covered_at_the_lower_bound(model: Model, ranks: int, grid: EngineGrid) -> None:
    held = sources(model, trainer_layout(model, ranks, 8, 2, 8 if model.geometry.num_experts else 1))
    check_bound(model, ranks, held, engine_destinations(model.geometry, grid, ranks // grid.size))


@pytest.mark.parametrize(
    ("ranks", "ep", "etp", "fused"),
    [
        (256, 16, 2, False),
        pytest.param(256, 8, 4, True, marks=pytest.mark.full),
        pytest.param(16384, 32, 4, False, marks=pytest.mark.full),
    ],
)
def test_experts_in_parts_on_uneven_interleaved_stages(ranks: int, ep: int, etp: int, fused: bool) -> None:
    """Each expert is split. Stages have one or two layers in two chunks. Experts are separate or in one grouped product."""
    model = shallow(QWEN_235B, 10, experts=64)
    layout = ParallelLayout(ranks, tp=8, pp=4, vpp=2, ep=ep, etp=etp, layers_per_stage=(1, 1, 2, 1, 1, 1, 1, 2))
    held = trainer_places(stage_names(model.geometry, layout, fused=fused), model.geometry, layout)
    check_bound(model, ranks, held, destinations(model, 8, ranks // 8))


@pytest.mark.parametrize(
    ("model", "trainers", "engines", "engine_tp", "engines_per_node"),
    [
        (DENSE, (2048, 8, 8, 1), 64, 8, 1),
        (MOE, (2048, 8, 4, 8), 64, 8, 2),
        (DENSE, (64, 4, 2, 1), 9, 4, 3),
    ],
)
def test_engines_of_their_own_get_what_they_need_and_their_machines_import_it_once(
    model: Model, trainers: tuple[int, int, int, int], engines: int, engine_tp: int, engines_per_node: int
) -> None:
    """Trainer machines have eight ranks. Engine ranks follow, on machines of another size. Engines hold no weights."""
    first = trainers[0]
    held = sources(model, trainer_layout(model, *trainers))
    needed = destinations(model, engine_tp, engines, first)
    machines = even_nodes(first, 8)
    machines += [machines[-1] + 1 + number for number in even_nodes(engines * engine_tp, engine_tp * engines_per_node)]
    check_bound(model, first + engines * engine_tp, held, needed, machines)
    counted = count_bytes(plan_of(model, held, needed, machines))
    assert counted.received[:first].sum() == counted.local.sum() == 0
    distinct = 2 * sum(prod(shape) for shape in shapes(model).values())  # every machine contains whole engines
    by_machine = np.bincount(np.array(machines[first:]) - machines[first], counted.imported[first:])
    np.testing.assert_array_equal(by_machine, np.full(-(-engines // engines_per_node), distinct))
    sent = counted.sent[:first]  # no rank sends everything: the busiest sends at most twice the mean
    assert sent.sum() == distinct * len(by_machine) and sent.max() <= 2 * sent.mean() + BUCKET


def check_bound(
    model: Model, ranks: int, held: list[Place], needed: list[Place], nodes: list[int] | int | None = 8
) -> None:
    """Check that a plan covers every tensor, receives no unneeded byte, and that the sums of its parts agree."""
    check_coverage(held, needed, shapes(model))
    plan = plan_of(model, held, needed, nodes)
    counted = count_bytes(plan)
    np.testing.assert_array_equal(counted.received, counted.lower_bound)
    assert counted.sent.sum() == counted.received.sum()
    assert max(counted.peak_sent.max(), counted.peak_received.max()) <= BUCKET
    for rank in (ranks // 2 + 1, ranks - 1):
        view = plan.rank_view(rank)
        assert view.received_bytes == counted.received[rank] == lower_bound(held, needed, rank)
        assert view.sent_bytes == counted.sent[rank]
        assert view.local_bytes == counted.local[rank]
        assert peak_bytes(view, depth=2) <= 4 * BUCKET
    check_agreement(plan, ranks // 2 + 1)


def rectangles(copies: list[Copy]) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    return [(copy.hf_name, copy.message_offset, copy.start, copy.shape) for copy in copies]


def cells(copies: list[Copy]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return first element and byte offset of each row of a message, however rows are joined into copies."""
    return sorted(
        (copy.hf_name, copy.message_offset + row * copy.nbytes // copy.shape[0], (copy.start[0] + row, *copy.start[1:]))
        for copy in copies
        for row in range(copy.shape[0])
    )


def check_agreement(plan: Plan, rank: int) -> None:
    """Check that the peers of a rank send exactly the bytes that it expects in its first busy buckets."""
    mine = plan.rank_view(rank)
    busy = [bucket.index for bucket in mine.buckets if bucket.receive_bytes][:2]
    views: dict[int, RankPlan] = {}
    for index in busy:
        for number, phase in enumerate(mine.buckets[index].phases):
            for message in phase.receives[:3]:
                if message.peer not in views:
                    views[message.peer] = plan.rank_view(message.peer)
                sends = views[message.peer].buckets[index].phases[number].sends
                (sent,) = [other for other in sends if other.peer == rank]
                assert sent.nbytes == message.nbytes
                if rectangles(sent.copies) != rectangles(message.copies):  # joined differently, or wrong
                    assert cells(sent.copies) == cells(message.copies)


@pytest.mark.parametrize("ranks_per_node", [None, 8])
@pytest.mark.parametrize(
    ("model", "ranks", "tp", "pp", "ep", "engine_tp"),
    [(DENSE, 64, 8, 2, 1, 4), (DENSE, 48, 4, 2, 1, 8), (DENSE, 1024, 8, 8, 1, 8), (MOE, 512, 8, 2, 8, 8)],
)
def test_replicas_share_the_sending(
    model: Model, ranks: int, tp: int, pp: int, ep: int, engine_tp: int, ranks_per_node: int | None
) -> None:
    """Among ranks that hold the same tensors, the busiest sends at most a tenth more than the mean."""
    held, needed = build_places(model, ranks, tp, pp, ep, engine_tp)
    counted = count_bytes(plan_of(model, held, needed, ranks_per_node))
    sent = counted.sent.reshape(pp, -1, max(tp, ep))  # stage, replica, shard
    assert (sent.max(axis=1) <= 1.1 * sent.mean(axis=1)).all()


def test_regular_layouts_send_evenly_over_all_ranks() -> None:
    """Stages are even except for the embedding and the output layer, a sixteenth of the first and last of eight stages."""
    for model, layout in ((LLAMA_70B, (64, 4, 4, 1, 8)), (MOE, (512, 8, 1, 8, 4))):
        counted = count_bytes(plan_of(model, *build_places(model, *layout)))
        assert counted.sent.max() <= 1.1 * counted.sent.mean()


def test_digest_is_the_same_wherever_it_is_computed() -> None:
    first, second = (plan_of(MOE, *build_places(MOE, 64, 4, 2, 8, 8)) for _ in range(2))
    assert first.digest == second.digest
    assert len(first.digest) == 32
    assert first.digest != plan_of(MOE, *build_places(MOE, 64, 4, 2, 8, 4)).digest
    assert first.digest != plan_of(MOE, *build_places(MOE, 128, 4, 2, 8, 8)).digest
    assert first.digest != plan_of(MOE, *build_places(MOE, 64, 4, 2, 8, 8), nodes=4).digest


def test_a_moved_view_changes_the_digest_though_no_message_changes() -> None:
    held, needed = build_places(DENSE, 4, 2, 2, 1, 2)
    piece = needed[0].pieces[0]
    moved = replace(needed[0], pieces=(replace(piece, offset=piece.offset + 1), *needed[0].pieces[1:]))
    assert plan_of(DENSE, held, needed).digest != plan_of(DENSE, held, [moved, *needed[1:]]).digest


def test_buckets_go_through_the_network_layer_by_layer() -> None:
    names = bucket_names(plan_of(MOE, *build_places(MOE, 64, 4, 2, 8, 8)))
    layers = [int(name.split(".")[2]) for bucket in names for name in dict.fromkeys(bucket) if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0][0] == "model.embed_tokens.weight"
    assert names[-1][-1] == "lm_head.weight"


def test_a_missing_expert_is_noticed() -> None:
    held, needed = build_places(MOE, 64, 4, 2, 8, 8)
    lost = [place for place in held if place.pieces[0].hf_name != "model.layers.5.mlp.experts.3.down_proj.weight"]
    assert len(lost) == len(held) - 1
    with pytest.raises(CoverageError, match=r"layers\.5\.mlp\.experts\.3\.down_proj"):
        check_coverage(lost, needed, shapes(MOE))
