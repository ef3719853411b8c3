"""MTP layers that learn, in a vLLM engine over two ranks: drafts follow the policy where they are synced, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.rollout.drafts_worker import DEPTH, NEW_TOKENS

SYNCED = ("first", "synced", "synced again")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.rollout.drafts_worker", 2, tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("state", [*SYNCED, "stale"])
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


def test_the_draft_holds_the_trainers_bits_after_a_sync(findings: Any) -> None:
    whole = {"eh_proj": True, "norm": True, "layer": True}
    assert findings["synced"]["bits"] == findings["synced again"]["bits"] == whole
    assert findings["stale"]["bits"] == whole | {"norm": False}


def test_the_planner_describes_the_draft_without_an_engine(findings: Any) -> None:
    assert findings["unplanned"] == [[], []]
