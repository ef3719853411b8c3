"""Routes that are given: passes, updates and recomputation take them on every layout, and the router still learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_below, check_close
from tests.distributed.setting import NOISE
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("replay")
    return four_ranks.run("replay_worker", directory)


def test_a_pass_takes_every_route_and_its_logprobs_are_those_of_transformers(findings: Any) -> None:
    def check(found: Any) -> None:
        assert found["different"] == 0
        check_below("difference of logprobs", found["distance"], NOISE)
        assert found["moved"] > 1e-2, "the routes must matter"
        assert found["left_behind"] == 0, "a pass without routes is as before"

    check_all(findings["passes"], check)


def test_an_update_is_that_of_the_given_routes(findings: Any) -> None:
    def check(case: str) -> None:
        found, oracle = findings["updates"][case], findings["oracle"][case.split("/")[0]]
        check_close("loss/total", found["loss/total"], oracle["loss"], rel=1e-5)
        check_close("actor/grad_norm", found["actor/grad_norm"], oracle["grad_norm"], rel=1e-5)
        assert found["weights"] == ""
        check_close("actor/route_mismatch", found["actor/route_mismatch"], oracle["mismatch"], abs_=1e-6)
        assert oracle["mismatch"] > 0.3

    check_all(list(findings["updates"]), check)


def test_the_pass_for_old_logprobs_records_the_routes_of_transformers(findings: Any) -> None:
    def check(found: Any) -> None:
        assert found["different"] == 0 and found["all"] > 100

    check_all(findings["recorded"], check)


def test_the_gradient_of_the_router_is_a_difference_of_logprobs_under_the_same_routes(findings: Any) -> None:
    gradients, differences = zip(*findings["differences"], strict=True)
    assert max(map(abs, gradients)) > 0.1
    assert gradients == pytest.approx(differences, rel=0.02, abs=0.02)
