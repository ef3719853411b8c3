"""Train MTP layers and draft with them in vLLM engines over two ranks. Drafts follow the policy only if they are synced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_below
from tests.distributed.world import run_world
from tests.e2e.rollout.drafts_worker import DEPTH, ENGINES, NEW_TOKENS

SYNCED = ("first", "synced", "synced again")


@pytest.fixture(scope="module")
def of_layouts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.rollout.drafts_worker", 2, tmp_path_factory.mktemp("drafts"))


def check_layouts(of_layouts: Any, check: Callable[[Any], None]) -> None:
    """Call ``check`` with the results of each layout."""
    check_all(list(ENGINES), lambda name: check(of_layouts[name]))


def test_responses_follow_the_policy_whatever_the_drafts_are(of_layouts: Any) -> None:
    def check(found: Any) -> None:
        for state in (*SYNCED, "stale", "grown"):
            greedy, sampled = found[state]["greedy"], found[state]["sampled"]
            assert greedy["ids"] == greedy["expected"] and {*map(len, greedy["ids"])} == {NEW_TOKENS}, state
            check_below(state, max(greedy["gap"], sampled["gap"]), 1e-4)

    check_layouts(of_layouts, check)


def test_synced_drafts_keep_their_acceptance_and_stale_ones_lose_it(of_layouts: Any) -> None:
    """A policy that predicts like its MTP layer accepts all drafts.

    After the policy moves, stale drafts are nearly always wrong.
    """

    def check(found: Any) -> None:
        for share in (f"rollout/draft_acceptance/{depth}" for depth in range(1, DEPTH + 1)):
            for state in SYNCED:
                assert found[state]["greedy"][share] == 1, share
                assert found[state]["sampled"][share] > 2 * found["stale"]["sampled"][share], share
            assert found["stale"]["greedy"][share] < 0.2, share
        assert len({str(found[state]["greedy"]["ids"]) for state in ("first", "synced", "stale")}) == 3, "it has moved"
        assert found["synced"]["greedy"]["rollout/draft_pass_tokens"] == 1 + DEPTH
        assert found["stale"]["greedy"]["rollout/draft_pass_tokens"] < 1.5

    check_layouts(of_layouts, check)


def test_a_layer_that_drafts_computes_the_same_however_the_engine_is_cut(of_layouts: Any) -> None:
    shares = [
        [found["grown"]["greedy"][f"rollout/draft_acceptance/{depth}"] for depth in range(1, DEPTH + 1)]
        for found in map(of_layouts.get, ENGINES)
    ]
    assert 0.1 < shares[0][0] < 0.9, "of attention and experts something is heard"
    assert shares == [shares[0]] * len(ENGINES)


def test_the_draft_holds_the_trainers_bits_after_a_sync(of_layouts: Any) -> None:
    whole = {"eh_proj": True, "norm": True, "layer": True}

    def check(found: Any) -> None:
        assert found["synced"]["bits"] == found["synced again"]["bits"] == [whole] * found["num_drafts"]
        assert found["stale"]["bits"] == [whole | {"norm": False}] * found["num_drafts"]

    check_layouts(of_layouts, check)


def test_layers_that_draft_travel_in_8_bits_as_the_model_does(of_layouts: Any) -> None:
    """An engine on a CPU computes with the values of the 8-bit weights, as if it had loaded them. This includes drafts."""

    def check(found: Any) -> None:
        brought, loaded = found["8 bits"]
        assert brought == loaded
        assert brought["greedy"]["gap"] > 10 * found["grown"]["greedy"]["gap"], "8 bits are no other ones"

    check_layouts(of_layouts, check)


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


def test_the_planner_knows_which_ranks_draft_and_what_they_hold(of_layouts: Any) -> None:
    assert [of_layouts[name]["num_drafts"] for name in ENGINES] == [2, 2, 1], "earlier stages draft nothing"
    assert [of_layouts[name]["unplanned"] for name in ENGINES] == [[[], []]] * len(ENGINES)
