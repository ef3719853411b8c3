"""Run the bridge over parts of the world: two groups of ranks at the same time. Each sees only its own part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.bridge_groups_worker import PAIRS
from tests.distributed.eight_bit_engines import GRIDS
from tests.distributed.world import World
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors

OVER = ("world", "pairs", "pairs, by messages")


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("groups")
    return four_ranks.run("bridge_groups_worker", directory)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize(("sync", "what"), enumerate(["all tensors", "norms", "averages"]))
def test_a_sync_brings_every_tensor_bit_for_bit(findings: Any, over: str, sync: int, what: str) -> None:
    assert [found["wrong"][sync] for found, _ in findings[over]] == [[]] * 4, what


@pytest.mark.parametrize("over", OVER[1:])
def test_a_group_moves_the_bytes_that_the_world_moves(findings: Any, over: str) -> None:
    """Each rank of a pair holds half of the model and needs all of it."""
    world, pairs = ([found["bytes"] for found, _ in findings[which]] for which in ("world", over))
    for pair in PAIRS:
        for place, rank in enumerate(pair):
            received, local = ([sync[k] for sync in pairs[rank]] for k in (0, 1))
            assert received == [sync[0] for sync in world[place]]
            assert local == [sync[1] for sync in world[place]]
            assert received[0] > received[1] == 0 and local[1] > 0


@pytest.mark.parametrize("over", OVER)
def test_files_of_a_group_hold_its_weights_and_its_state(findings: Any, over: str) -> None:
    assert [differ for _, differ in findings[over]] == [[]] * 4


def test_trainers_and_engines_may_be_on_ranks_of_their_own(findings: Any) -> None:
    """Two ranks hold parts of the model (float64). Two other ranks have one engine each, which receives the whole model."""
    num_bytes = 8 * sum(tensor.numel() for tensor in hf_tensors(GEOMETRY).values())
    for found in findings["apart"]:
        assert found["wrong"] == []
        assert found["bytes"] == [0 if found["is_trainer"] else num_bytes, 0]


def test_digests_show_every_rank_the_tensor_that_one_engine_has_wrong(findings: Any) -> None:
    text = "rank 3 holds values of model.layers.1.input_layernorm.weight at (0,) that differ from earlier ranks"
    assert findings["digests"] == [[text], [text], [text, "-1"], [text, "-1"]]


@pytest.mark.parametrize("tp", ["2", "4"])
def test_engines_of_16_bits_get_the_values_of_8_whatever_cuts_the_blocks(findings: Any, tp: str) -> None:
    """Four ranks hold parts of a bf16 model, and each needs the rest. Every matrix has blocks that two ranks share."""
    for found in findings["8 bits"][tp]:
        assert found["wrong"] == [[]] * 6
        assert len(set(found["bytes"])) == 1


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", GRIDS)
def test_engines_of_every_layout_hold_the_8_bits_of_slow_versions(findings: Any, name: str, kind: str) -> None:
    """The engine tensors equal the slow quantisers'. After a changed bit on the last rank, the digests of all ranks report it."""
    found = [rank[f"{name} {kind}"] for rank in findings["engines of 8 bits"]]
    for rank in found:
        assert rank["wrong"] == [] and rank["8 bits"] == 4 * 2 // GRIDS[name].pp
        matrix, scale = rank["tampered"]
        suffix = {"fp8": "_scale_inv", "int8": "_scale"}[kind]
        assert re.search(r"_proj\.weight( at|$)", matrix) and f"_proj.weight{suffix}" in scale
    grid = GRIDS[name]  # use the first rank of each stage; if blocks are cut, other ranks may have one more scale
    firsts = found[: grid.tp * grid.pp : grid.tp]
    assert max(rank["bytes"][0] for rank in firsts) == found[0]["bytes"][1]


def test_changes_of_8_bits_travel_alone(findings: Any) -> None:
    """A hundredth of the elements changes.

    It costs one byte for the value and one for the number of unchanged elements before it.
    """
    for found in findings["changes of 8 bits"]:
        assert found["wrong"] == []
        assert 0 < found["sent"] < 0.06 * found["whole"]


def test_engines_get_different_numbers_of_a_counter(findings: Any) -> None:
    lead, _, other_lead, _ = findings["claims"]
    for mine, theirs, count in zip(lead, other_lead, (3, 2, 1), strict=True):
        assert sorted(mine + theirs) == [count * number for number in range(len(mine + theirs))]
        assert mine == sorted(mine) and theirs == sorted(theirs)


def test_a_rank_with_several_groups_opens_no_more_files_than_the_doctor_requires(findings: Any) -> None:
    assert all(count <= 512 + 4 * 4 for count in findings["open files"]), findings["open files"]
