"""Compare the map of sources for all ranks with the parameters of every rank of the layout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.trainer_layout import stage_names, trainer_places
from tests.unit.pairs import pairwise

QWEN = ModelGeometry(
    "qwen3_moe", 5, 8, GroupedSizes(4, 2, 2), 16, 13, True, experts=ExpertSizes(8, 8, 2, dense_layers=(1, 2))
)
MIXTRAL = replace(QWEN, family="mixtral", tied_embeddings=False, experts=ExpertSizes(8, 8, 2))
LAYOUTS = [
    ParallelLayout(4, tp=2, pp=2, layers_per_stage=(2, 3)),
    ParallelLayout(16, tp=2, pp=2, ep=4, etp=1, layers_per_stage=(4, 1)),
    ParallelLayout(16, tp=1, pp=2, vpp=2, ep=2, etp=4, layers_per_stage=(1, 1, 2, 1)),
    ParallelLayout(24, tp=2, ep=4, etp=3),
    ParallelLayout(16, tp=4, ep=8, etp=2),
]


@pairwise(
    ("fused", [False, True]),
    ("layout", list(LAYOUTS)),
    ("geometry", [QWEN, MIXTRAL]),
)
def test_every_rank_is_said_to_hold_its_own_parts(geometry: ModelGeometry, layout: ParallelLayout, fused: bool) -> None:
    assert geometry.experts is not None
    if geometry.experts.ffn_size % layout.expert_tp:
        geometry = replace(geometry, experts=replace(geometry.experts, ffn_size=6))
    names = stage_names(geometry, layout, fused=fused)
    places = trainer_places(names, geometry, layout)
    held: dict[int, dict[str, object]] = defaultdict(dict)
    for place in places:
        for rank in place.ranks:
            assert held[rank].setdefault(place.buffer, place.pieces) is place.pieces, "said twice"
    for rank in range(layout.world_size):
        stage = layout.coordinates(rank)["pp"]
        assert held[rank] == {name: tuple(pieces(name, geometry, layout.shard_of(name, rank))) for name in names[stage]}
    check_coverage(places, [], hf_shapes(geometry))


def test_names_of_a_stage_by_hand() -> None:
    layout = ParallelLayout(2, pp=2, layers_per_stage=(4, 1))
    start, layer = "decoder.layers.4.", QWEN.num_experts
    sequential = [f"mlp.experts.local_experts.{k}.linear_fc{n}.weight" for n in (1, 2) for k in range(layer)]
    grouped = [f"mlp.experts.linear_fc{n}.weight{k}" for n in (1, 2) for k in range(layer)]
    shared = [
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
    ]
    last = {"decoder.final_layernorm.weight", "output_layer.weight"}
    for fused, others in ((False, ["input_layernorm.weight", *sequential]), (True, ["", *grouped])):
        others = [name or "self_attention.linear_qkv.layer_norm_weight" for name in others]
        found = stage_names(QWEN, layout, fused=fused)[1]
        assert set(found) == {start + name for name in (*shared, *others)} | last
        assert len(found) == len(set(found))
    dense = [name for name in stage_names(QWEN, layout, fused=True)[0] if name.startswith("decoder.layers.1.mlp.")]
    assert sorted(name.removeprefix("decoder.layers.1.mlp.") for name in dense) == [
        "linear_fc1.layer_norm_weight",
        "linear_fc1.weight",
        "linear_fc2.weight",
    ]
