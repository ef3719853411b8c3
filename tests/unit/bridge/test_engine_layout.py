"""The layout of engines that tests and benchmarks send weights to: every element is there once a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.geometry import DeltaSizes, ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import EngineGrid
from tests.engine_layout import destinations, stage_layers
from tests.trainer_layout import stage_names, trainer_places

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
    assert [len(stage_layers(EngineGrid(pp=3), 8, stage)) for stage in range(3)] == [3, 3, 2]
    assert [len(stage_layers(EngineGrid(pp=4), 94, stage)) for stage in range(4)] == [23, 24, 24, 23]
    assert [list(stage_layers(EngineGrid(pp=2), 4, stage)) for stage in range(2)] == [[0, 1], [2, 3]]
