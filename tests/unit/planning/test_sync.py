"""What engines hold, and a sync's bytes by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.layouts import stage_names, trainer_places
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.implied import sent_geometry
from rlhf_mcore.config.model_files import read_geometry
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import DeltaSizes, ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import GPUS, Assumptions, EngineGrid, GpuType, PlannedRole, engine_grid
from rlhf_mcore.planning.sync import (
    destinations,
    engine_bytes,
    engine_numel,
    engine_tensors,
    estimate_seconds,
    kv_bytes_per_token,
    num_devices,
    plan_sync,
    sent_bytes,
    state_bytes_per_sequence,
    weight_bytes,
)

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
SMALL = ModelGeometry("qwen2", 2, 64, GroupedSizes(4, 2, 16), 96, 100, True)
MIXTURE = ModelGeometry(
    "mixtral", 2, 64, GroupedSizes(4, 2, 16), 96, 100, False, experts=ExpertSizes(4, 96, per_token=2)
)
DELTA_NETS = replace(
    SMALL,
    family="qwen3_5_text",
    attention=replace(SMALL.attention, has_qk_norm=True),
    delta=DeltaSizes(layers=(0,), key_heads=4, value_heads=8, key_dim=6, value_dim=10, kernel=4),
)
BY_HEAD = replace(
    DELTA_NETS,
    family="qwen3_next",
    experts=ExpertSizes(4, 96, per_token=2, shared_ffn_size=32),
)

WITH_MTP = replace(
    MIXTURE, family="glm4_moe", experts=ExpertSizes(4, 96, per_token=2, shared_ffn_size=96), mtp_layers=1
)


@pytest.mark.parametrize(
    "geometry", [SMALL, MIXTURE, WITH_MTP, replace(SMALL, family="qwen3", tied_embeddings=False), DELTA_NETS, BY_HEAD]
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_engines_need_every_element_once_a_replica_and_padding_is_declared(geometry: ModelGeometry, tp: int) -> None:
    layout = ParallelLayout(4, tp=2, pp=2)
    sources = trainer_places(stage_names(geometry, layout), geometry, layout)
    check_coverage(sources, destinations(geometry, EngineGrid(tp), 4 // tp), hf_shapes(geometry))


GRIDS = [
    EngineGrid(2, ep=2),
    EngineGrid(4, ep=4),
    EngineGrid(dp=2, ep=2),
    EngineGrid(2, dp=2, ep=4),
    EngineGrid(2, dp=2),
]


@pytest.mark.parametrize("grid", [*GRIDS, EngineGrid(1, pp=2), EngineGrid(2, pp=2, ep=2)], ids=str)
@pytest.mark.parametrize("geometry", [MIXTURE, BY_HEAD, replace(MIXTURE, tied_embeddings=True)], ids=lambda g: g.family)
def test_every_grid_of_an_engine_has_every_element_and_experts_where_they_are_shared_out(
    geometry: ModelGeometry, grid: EngineGrid
) -> None:
    needed, shapes = destinations(geometry, grid, 1), hf_shapes(geometry)
    check_coverage(needed, needed, shapes)  # as sources: every element is somewhere in the engine
    for name in (name for name in shapes if ".experts." in name):
        owners = [place.ranks[0] for place in needed for piece in place.pieces if piece.hf_name == name]
        sharers = grid.tp * grid.dp
        assert len(owners) == (1 if grid.ep > 1 else sharers)
    for place in needed if grid.ep > 1 else ():
        for piece in place.pieces:
            if ".experts." in piece.hf_name:  # four experts; vLLM's ranks are (dp, pp, tp)
                (rank,), expert = place.ranks, int(piece.hf_name.split(".experts.")[1].split(".")[0])
                stage_rank = rank // (grid.tp * grid.pp) * grid.tp + rank % grid.tp
                assert expert * grid.ep // 4 == stage_rank


def test_layers_left_over_are_on_the_last_stages_but_the_very_last() -> None:
    """vllm.distributed.utils.get_pp_indices."""
    assert [len(EngineGrid(pp=3).layers(8, stage)) for stage in range(3)] == [3, 3, 2]
    assert [len(EngineGrid(pp=4).layers(94, stage)) for stage in range(4)] == [23, 24, 24, 23]
    assert [list(EngineGrid(pp=2).layers(4, stage)) for stage in range(2)] == [[0, 1], [2, 3]]


def test_key_heads_are_replicated_where_there_are_fewer_than_ranks() -> None:
    geometry = read_geometry(MODELS / "Llama-3-8B", "lm")  # 8 key heads of 128, 32 layers
    assert kv_bytes_per_token(geometry, EngineGrid(1), 2) == 128 * 1024  # 2 * 32 * 8 * 128 * 2
    assert (
        kv_bytes_per_token(geometry, EngineGrid(8), 2) == kv_bytes_per_token(geometry, EngineGrid(16), 2) == 16 * 1024
    )


def test_gated_delta_nets_keep_states_of_a_sequence() -> None:
    geometry = read_geometry(MODELS / "Qwen3-Next-80B-A3B", "lm")
    # 36 layers of 32 states of 128 x 128 in fp32, and 3 tokens of 2 * 16 + 32 heads of 128 in bf16.
    assert (
        state_bytes_per_sequence(geometry, EngineGrid(1), 2)
        == 36 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128)
        == 77_266_944
    )
    assert state_bytes_per_sequence(geometry, EngineGrid(8), 2) == 77_266_944 // 8
    assert state_bytes_per_sequence(SMALL, EngineGrid(1), 2) == 0


def test_an_engine_rank_holds_its_share_of_the_model() -> None:
    geometry = read_geometry(MODELS / "Qwen3-30B-A3B", "lm")
    total = sum(prod(shape) for shape in hf_shapes(geometry).values())
    assert engine_numel(geometry, EngineGrid(1)) == total  # 151936 rows are a multiple of 64: nothing is padded
    assert 8 * engine_numel(geometry, EngineGrid(8)) == pytest.approx(
        total, rel=0.02
    )  # norms, routers and key heads are held twice and more


def test_nothing_moves_where_engines_are_cut_as_the_actor() -> None:
    cfg = Config()
    actor = PlannedRole("actor", replace(SMALL, vocab_size=128), ParallelLayout(1), True)
    sync = plan_sync(cfg, actor, 1, GPUS["H100"], Assumptions())
    assert (sync.received, sync.received_total, sync.seconds) == (0, 0, 0.0)
    assert sync.local_total == 2 * sum(prod(shape) for shape in hf_shapes(actor.geometry).values())


def test_an_uncut_engine_receives_what_the_other_stage_has() -> None:
    cfg = Config()
    actor = PlannedRole("actor", MIXTURE, ParallelLayout(2, pp=2), True)
    sync = plan_sync(cfg, actor, 2, GPUS["H100"], Assumptions(link_efficiency=1.0))
    total = 2 * sum(prod(shape) for shape in hf_shapes(MIXTURE).values())
    assert sync.received_total == total  # each of two engines gets the half that its rank does not have
    assert sync.imported == 0
    assert sync.seconds == pytest.approx(sync.received / 450e9)


def test_mtp_layers_that_learn_travel_to_engines_that_draft_with_them() -> None:
    """Beside a layer they have two norms before a projection of twice the width, and one behind."""
    cfg, actor = Config(), PlannedRole("actor", WITH_MTP, ParallelLayout(2, pp=2), True)
    cfg.actor.mtp.mode = "train"
    received = []
    for method in ("off", "ngram", "mtp"):
        cfg.rollout.speculative.method = method
        received.append(plan_sync(cfg, actor, 2, GPUS["H100"], Assumptions()).received_total)
    attention, experts = 64 * 64 + 2 * 32 * 64 + 64 * 64, 4 * 64 + 4 + 4 * 3 * 96 * 64 + 3 * 96 * 64
    layer = attention + experts + 2 * 64 + 64 * 128 + 3 * 64
    # To the engine on the first stage. The last one has a copy of the embedding, which its engine needs no longer receive.
    assert [each - received[0] for each in received] == [0, 0, 2 * (layer - 100 * 64)]


@pytest.mark.parametrize("mode", ["keep", "train"])
def test_the_last_stage_of_an_engine_that_drafts_has_an_embedding(mode: str) -> None:
    cfg = Config()
    cfg.rollout.layout.pp, cfg.actor.mtp.mode = 2, mode
    for method, embed in {"ngram": [0], "mtp": [0, 1]}.items():
        cfg.rollout.speculative.method = method
        held = [
            {t.name for t in engine_tensors(sent_geometry(cfg, WITH_MTP), engine_grid(cfg), rank)} for rank in range(2)
        ]
        assert [rank for rank in range(2) if "model.embed_tokens.weight" in held[rank]] == embed
        with_norm = [rank for rank in range(2) if "model.layers.2.enorm.weight" in held[rank]]
        assert with_norm == ([1] if (method, mode) == ("mtp", "train") else [])


def test_nodes_receive_over_the_network() -> None:
    cfg = Config()
    actor = PlannedRole("actor", MIXTURE, ParallelLayout(2, pp=2), True)
    two_nodes = replace(GPUS["H100"], per_node=1)
    sync = plan_sync(cfg, actor, 2, two_nodes, Assumptions(link_efficiency=0.5))
    assert sync.imported == sync.received
    assert sync.seconds == pytest.approx(sync.received / 25e9)


def test_engines_of_their_own_receive_everything() -> None:
    cfg = Config()
    cfg.rollout.placement, cfg.rollout.num_engines, cfg.rollout.layout.tp = "disaggregated", 3, 2
    actor = PlannedRole("actor", replace(SMALL, vocab_size=128), ParallelLayout(1), True)
    assert num_devices(cfg, 1) == 7
    sync = plan_sync(cfg, actor, 1, GPUS["H100"], Assumptions(link_efficiency=1.0))
    held = 2 * engine_numel(actor.geometry, EngineGrid(2))  # bf16; norms are held twice
    assert (sync.received, sync.received_total, sync.local_total, sync.imported) == (held, 6 * held, 0, 0)
    ideal = Assumptions(link_efficiency=1.0)
    for find in (plan_seconds, estimate_seconds):  # the one trainer rank sends to six ranks of engines
        assert find(cfg, actor, GPUS["H100"], ideal) == pytest.approx(6 * held / 450e9)
    nodes = plan_sync(cfg, actor, 1, replace(GPUS["H100"], per_node=1), ideal)
    assert nodes.imported == held


def test_what_goes_to_a_machine_of_engines_is_sent_there_once() -> None:
    """A machine with the trainer's four ranks, and two machines with two engines of two ranks each."""
    cfg = Config()
    cfg.rollout.placement, cfg.rollout.num_engines, cfg.rollout.layout.tp = "disaggregated", 4, 2
    geometry = replace(SMALL, vocab_size=128)
    actor = PlannedRole("actor", geometry, ParallelLayout(4, pp=2), True)
    machines = replace(GPUS["H100"], per_node=4)
    sync = plan_sync(cfg, actor, 4, machines, Assumptions(link_efficiency=1.0))
    assert sync.received_total == 8 * 2 * engine_numel(geometry, EngineGrid(2))
    whole = 2 * sum(prod(shape) for shape in hf_shapes(geometry).values())
    assert sync.seconds >= 2 * whole / 4 / 50e9  # both import it, from four ranks
    assert estimate_seconds(cfg, actor, machines, Assumptions(link_efficiency=1.0)) == pytest.approx(
        2 * 2 * 2 * engine_numel(geometry, EngineGrid(2)) / 4 / 50e9
    )


@pytest.mark.parametrize(("engine", "held"), [("vllm", 9_082_904_576), ("hf", 16_060_522_496)])
def test_8_bits_of_a_llama_by_hand(engine: str, held: int) -> None:
    """Of 8,030,261,248 elements 6,979,321,856 are in matrices of layers, which are 425,984 blocks of 128x128."""
    cfg = Config()
    cfg.rollout.engine, cfg.rollout.quantization = engine, "fp8"
    geometry = read_geometry(MODELS / "Llama-3-8B", "lm")
    actor = PlannedRole("actor", geometry, ParallelLayout(2, tp=2), True)
    assert engine_bytes(cfg, geometry, "bf16") == held  # the engine hf gets the values in bf16
    moved = 6_979_321_856 + 4 * 425_984 + 2 * (8_030_261_248 - 6_979_321_856)
    assert sent_bytes(cfg, geometry, "bf16") == moved == 9_082_904_576
    sync = plan_sync(cfg, actor, 2, GPUS["H100"], Assumptions())
    assert sync.received_total + sync.local_total == 2 * moved
    cfg.rollout.quantization = "int8"
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert sent_bytes(cfg, geometry, "bf16") == moved + 4 * (rows - 425_984)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize(
    "grid", [EngineGrid(4, ep=4), EngineGrid(dp=4, ep=4), EngineGrid(dp=2), EngineGrid(pp=2)], ids=str
)
def test_8_bits_of_whole_and_of_cut_experts_by_hand(grid: EngineGrid, quantization: str) -> None:
    """Qwen3-30B-A3B: 48 layers of 32 heads and 4 of keys, each with 128 numbers, and of 128 experts of 768 rows.

    Both stages have the embeddings.
    """
    geometry = read_geometry(MODELS / "Qwen3-30B-A3B", "lm")
    sharers, rows = grid.tp * grid.dp, grid.tp
    attention = {(4096 // rows, 2048): 1, (512 // rows, 2048): 2, (2048, 4096 // rows): 1}
    cut = 1 if grid.ep > 1 else sharers
    experts = {(768 // cut, 2048): 2 * 128 // (sharers // cut), (2048, 768 // cut): 128 // (sharers // cut)}
    matrices = [*attention.items(), *experts.items()]
    elements = sum(n * height * width for (height, width), n in matrices)
    scales = elements // 128**2 if quantization == "fp8" else sum(n * height for (height, _), n in matrices)
    others = 128 * 2048 + 2 * 2048 + 2 * 128
    ends = 2 * 151936 * 2048 // rows + 2048
    expected = 48 // grid.pp * (elements + 4 * scales + 2 * others) + 2 * ends
    assert weight_bytes(geometry, grid, 2, quantization) == expected


def plan_seconds(cfg: Config, actor: PlannedRole, gpu: GpuType, assumed: Assumptions) -> float:
    return plan_sync(cfg, actor, 1, gpu, assumed).seconds
