"""MTP layers that learn, in vLLM engines over two ranks: drafts follow the policy where they are synced, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.rollout.drafts_worker import DEPTH, ENGINES, NEW_TOKENS

SYNCED = ("first", "synced", "synced again")


@pytest.fixture(scope="module")
def of_layouts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.rollout.drafts_worker", 2, tmp_path_factory.mktemp("drafts"))


@pytest.fixture(params=ENGINES)
def findings(of_layouts: Any, request: pytest.FixtureRequest) -> Any:
    return of_layouts[request.param]


@pytest.mark.parametrize("state", [*SYNCED, "stale", "grown"])
def test_what_is_drawn_follows_the_policy_whatever_the_drafts_are(findings: Any, state: str) -> None:
    greedy, sampled = findings[state]["greedy"], findings[state]["sampled"]
    assert greedy["ids"] == greedy["expected"] and {*map(len, greedy["ids"])} == {NEW_TOKENS}
    assert greedy["gap"] < 1e-4 and sampled["gap"] < 1e-4


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_synced_drafts_keep_their_acceptance_and_stale_ones_lose_it(findings: Any, depth: int) -> None:
    """A policy that predicts as its MTP layer does takes all drafts; of one that has moved on hardly any is right."""
    share = f"rollout/draft_acceptance/{depth}"
    for state in SYNCED:
        assert findings[state]["greedy"][share] == 1
        assert findings[state]["sampled"][share] > 2 * findings["stale"]["sampled"][share]
    assert findings["stale"]["greedy"][share] < 0.2
    assert len({str(findings[state]["greedy"]["ids"]) for state in ("first", "synced", "stale")}) == 3, "it has moved"


def test_passes_are_longer_where_drafts_are_taken(findings: Any) -> None:
    assert findings["synced"]["greedy"]["rollout/draft_pass_tokens"] == 1 + DEPTH
    assert findings["stale"]["greedy"]["rollout/draft_pass_tokens"] < 1.5


def test_a_layer_that_drafts_computes_the_same_however_the_engine_is_cut(of_layouts: Any) -> None:
    shares = [
        [found["grown"]["greedy"][f"rollout/draft_acceptance/{depth}"] for depth in range(1, DEPTH + 1)]
        for found in map(of_layouts.get, ENGINES)
    ]
    assert 0.1 < shares[0][0] < 0.9, "of attention and experts something is heard"
    assert shares == [shares[0]] * len(ENGINES)


def test_the_draft_holds_the_trainers_bits_after_a_sync(findings: Any) -> None:
    whole = {"eh_proj": True, "norm": True, "layer": True}
    assert findings["synced"]["bits"] == findings["synced again"]["bits"] == [whole] * findings["num_drafts"]
    assert findings["stale"]["bits"] == [whole | {"norm": False}] * findings["num_drafts"]


def test_layers_that_draft_travel_in_8_bits_as_the_model_does(findings: Any) -> None:
    """An engine on a CPU computes with the values of the 8 bits: as if it had loaded them, drafts too."""
    brought, loaded = findings["8 bits"]
    assert brought == loaded
    assert brought["greedy"]["gap"] > 10 * findings["grown"]["greedy"]["gap"], "8 bits are no other ones"


def test_vllms_own_draft_of_8_bits_gets_what_its_loaders_write(of_layouts: Any) -> None:
    matrices = ["mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight"]
    matrices += ["mlp.shared_experts.down_proj.weight", "mlp.shared_experts.gate_up_proj.weight"]
    matrices += ["self_attn.o_proj.weight", "self_attn.qkv_proj.weight"]
    for found in of_layouts["modules"]:
        assert found["other than vLLM loads"] == found["unused"] == []
        assert found["8 bits"] == [f"draft.model.layers.4.mtp_block.{matrix}" for matrix in matrices]


def test_stages_have_equally_many_blocks_though_the_last_has_more_layers(of_layouts: Any) -> None:
    counts = of_layouts["pp2"]["num_blocks"]
    assert counts[0] == counts[1] > 0


def test_each_rank_drafts_but_those_of_earlier_stages(of_layouts: Any) -> None:
    assert [of_layouts[name]["num_drafts"] for name in ENGINES] == [2, 2, 1]


def test_the_planner_describes_the_draft_without_an_engine(findings: Any) -> None:
    assert findings["unplanned"] == [[], []]
