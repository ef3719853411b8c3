"""top_p and top_k below one: engines record what they drew from, and the trainer's ratios are of that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.truncated_worker import CASES, NEW_TOKENS


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.truncated_worker", 2, tmp_path_factory.mktemp("truncated"))


@pytest.mark.parametrize("case", CASES)
def test_what_engines_record_is_what_transformers_leaves(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["different"] == 0
    assert 2 <= found["largest"] <= CASES[case][3]
    assert found["lengths"][-1] == NEW_TOKENS
    assert found["greedy_without"], "what an evaluation draws greedily has none"


@pytest.mark.parametrize("case", CASES)
def test_ratios_of_the_same_policy_are_one_to_rounding_also_of_300_tokens(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["token"] == pytest.approx([1, 1, 1], abs=1e-4)
    assert found["token"][0] == pytest.approx(1, abs=1e-5)
    assert found["sequence"] == pytest.approx([1, 1, 1], abs=2e-3)  # 300 times 7e-6
    assert found["rollout/logprob_diff_mean"] < 1e-5, "the alarm on the agreement of engine and trainer looks at it"
    # Without the support the ratios are the masses of what was left, and their products.
    assert found["token_without"][0] == pytest.approx(found["rollout/support_mass"], abs=1e-5)
    assert found["token_without"][0] < 0.999 and found["sequence_without"][0] < 0.5
    assert 2 <= found["rollout/support_size"] <= found["largest"]
