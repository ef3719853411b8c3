"""Routes that are given: passes, updates and recomputation take them on every layout, and the router still learns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.replay_worker import LAYOUTS
from tests.distributed.setting import NOISE
from tests.distributed.world import World

CASES = [f"{model}/{layout}" for model, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return four_ranks.run("replay_worker", tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize("case", CASES)
def test_a_pass_takes_every_route_and_its_logprobs_are_those_of_transformers(findings: Any, case: str) -> None:
    found = findings["passes"][case]
    assert found["different"] == 0
    assert found["distance"] < NOISE
    assert found["moved"] > 1e-2, "the routes must matter"
    assert found["left_behind"] == 0, "a pass without routes is as before"


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_that_of_the_given_routes(findings: Any, case: str) -> None:
    found, oracle = findings["updates"][case], findings["oracle"][case.split("/")[0]]
    assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert found["actor/route_mismatch"] == pytest.approx(oracle["mismatch"], abs=1e-6)
    assert oracle["mismatch"] > 0.3


@pytest.mark.parametrize("case", CASES)
def test_the_pass_for_old_logprobs_records_the_routes_of_transformers(findings: Any, case: str) -> None:
    found = findings["recorded"][case]
    assert found["different"] == 0 and found["all"] > 100


def test_the_gradient_of_the_router_is_a_difference_of_logprobs_under_the_same_routes(findings: Any) -> None:
    gradients, differences = zip(*findings["differences"], strict=True)
    assert max(map(abs, gradients)) > 0.1
    assert gradients == pytest.approx(differences, rel=0.02, abs=0.02)
