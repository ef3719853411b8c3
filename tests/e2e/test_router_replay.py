"""Replay routes of experts with vLLM: the recorded routes, for all ways to compute tokens, and their effect on logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.routes_worker import CASES, LAYOUTS


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.routes_worker", 2, tmp_path_factory.mktemp("routes"))


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.dtype == "fp32"])
def test_recorded_routes_of_all_tokens_are_those_of_transformers(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["unknown"] == 0 and found["all"] > 3000
    assert found["different"] <= 2e-3 * found["all"], "rounding decides between two experts now and then"
    assert (found["cached"] > 0) == CASES[case].prefix_caching
    assert (found["preempted"] > 0) == (case == "preempted")
    assert found["without"], "requests that do not ask for routes have none"


@pytest.mark.parametrize("case", ["in parts", "preempted"])
def test_so_are_those_of_turns_across_which_weights_are_published(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["versions"] == 6, "each turn has new weights in its middle"
    assert found["turns_unknown"] == 0 and found["turns_all"] > 1000
    assert found["turns_different"] <= 2e-3 * found["turns_all"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_passes_take_the_engines_routes_and_their_logprobs_come_closer(findings: Any, layout: str) -> None:
    own, replayed = findings[layout]["own"], findings[layout]["replayed"]
    assert own[3] > 10, "an engine in bf16 and a trainer in fp32 route differently"
    assert replayed[3] == 0
    assert replayed[0] < own[0] / 3  # the mean difference of logprobs
    assert replayed[1] < own[1] / 10  # the KL
