"""Compare the placement rules of experts with tensors that are split by hand and by chunking, and with transformers' files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry, Shard
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.distributed.models import MOE_MODELS, make
from tests.unit.pairs import pairwise

QWEN = ModelGeometry(
    "qwen3_moe", 3, 8, GroupedSizes(4, 2, 2), 16, 13, False, experts=ExpertSizes(4, 6, 2, dense_layers=(1,))
)
MIXTRAL = replace(QWEN, family="mixtral", ffn_size=6, experts=ExpertSizes(4, 6, 2))
LAYER = "decoder.layers.2.mlp."
NAMES = {  # family -> block, gate, up, down
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def test_the_second_half_of_the_experts_cut_in_two_by_hand() -> None:
    shard = Shard(1, 2, expert_rank=1, expert_size=2)  # experts 2 and 3, rows 3 to 5 of each
    expert = "model.layers.2.mlp.experts.3."
    assert pieces(LAYER + "experts.local_experts.1.linear_fc1.weight", QWEN, shard) == [
        Piece(expert + "gate_proj.weight", (3, 0), (3, 8), 0, (8, 1)),
        Piece(expert + "up_proj.weight", (3, 0), (3, 8), 24, (8, 1)),
    ]
    assert pieces(LAYER + "experts.local_experts.1.linear_fc2.weight", QWEN, shard) == [
        Piece(expert + "down_proj.weight", (0, 3), (8, 3), 0, (3, 1))
    ]
    expert = "model.layers.2.block_sparse_moe.experts.2."
    assert [piece.hf_name for piece in pieces(LAYER + "experts.linear_fc1.weight0", MIXTRAL, shard)] == [
        expert + "w1.weight",
        expert + "w3.weight",
    ]
    assert pieces(LAYER + "experts.linear_fc2.weight0", MIXTRAL, shard)[0].hf_name == expert + "w2.weight"


@pytest.mark.parametrize("geometry", [QWEN, MIXTRAL], ids=lambda g: g.family)
def test_a_router_is_whole_everywhere(geometry: ModelGeometry) -> None:
    block = NAMES[geometry.family][0]
    expected = [Piece(f"model.layers.2.{block}.gate.weight", (0, 0), (4, 8), 0, (8, 1))]
    assert pieces(LAYER + "router.weight", geometry, Shard(1, 2)) == expected


@pairwise(
    ("grouped", [False, True]),
    ("tp, ep, etp", [(1, 1, None), (2, 1, None), (1, 2, None), (1, 4, 3), (2, 2, 1), (2, 2, 3), (3, 4, 1)]),
    ("geometry", [QWEN, MIXTRAL]),
)
def test_ranks_hold_every_part_of_every_expert_equally_often(
    geometry: ModelGeometry, tp: int, ep: int, etp: int | None, grouped: bool
) -> None:
    layout = ParallelLayout(12, tp=tp, ep=ep, etp=etp)
    generator = torch.Generator().manual_seed(0)
    experts = [
        {x: torch.rand((8, 6) if x == "down" else (6, 8), generator=generator) for x in ("gate", "up", "down")}
        for _ in range(4)
    ]
    block, *files = NAMES[geometry.family]
    hf = {
        f"model.layers.2.{block}.experts.{e}.{file}.weight": experts[e][x]
        for e in range(4)
        for x, file in zip(("gate", "up", "down"), files, strict=True)
    }
    covered = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for rank in range(12):
        cut, size = layout.expert_coordinates(rank)["etp"], layout.expert_tp
        for k, number in enumerate(torch.arange(4).chunk(ep)[layout.expert_coordinates(rank)["ep"]].tolist()):
            expert = experts[number]
            local = {
                "linear_fc1": torch.cat([expert[x].chunk(size)[cut] for x in ("gate", "up")]),
                "linear_fc2": expert["down"].chunk(size, dim=1)[cut].contiguous(),
            }
            for linear, tensor in local.items():
                name = LAYER + (
                    f"experts.{linear}.weight{k}" if grouped else f"experts.local_experts.{k}.{linear}.weight"
                )
                held = pieces(name, geometry, layout.shard_of(name, rank))
                assert sum(piece.numel for piece in held) == tensor.numel()
                for piece in held:
                    assert torch.equal(view(tensor, piece), hf[piece.hf_name][piece.slices])
                    covered[piece.hf_name][piece.slices] += 1
    for count in covered.values():
        assert torch.equal(count, torch.full_like(count, layout.expert_dp))


@pytest.mark.parametrize("name", MOE_MODELS)
def test_names_and_shapes_are_those_of_the_files_that_transformers_writes(tmp_path: Path, name: str) -> None:
    make(name, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert hf_shapes(load_spec(tmp_path).geometry) == {key: tuple(tensor.shape) for key, tensor in written.items()}


def test_dense_layers_have_their_own_mlp() -> None:
    names = hf_shapes(QWEN)
    assert names["model.layers.1.mlp.gate_proj.weight"] == (16, 8)
    assert "model.layers.1.mlp.gate.weight" not in names and "model.layers.0.mlp.gate_proj.weight" not in names
    assert names["model.layers.0.mlp.experts.3.down_proj.weight"] == (8, 6)


@pytest.mark.parametrize(
    ("geometry", "name"),
    [
        (QWEN, "decoder.layers.0.mlp.router.expert_bias"),
        (QWEN, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.bias"),
        (QWEN, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"),
        (replace(QWEN, family="qwen3"), "decoder.layers.0.mlp.router.weight"),
    ],
)
def test_what_no_rule_places_is_an_error(geometry: ModelGeometry, name: str) -> None:
    with pytest.raises(KeyError, match="no rule of family"):
        pieces(name, geometry, Shard(0, 1))
