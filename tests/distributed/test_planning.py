"""The planner's bytes are those of real Megatron models, checkpoints and bridges, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.planning_worker import CASES
from tests.distributed.world import World

KEYS = ["/".join(case) for case in CASES]
DENSE = [key for key in KEYS if not key.startswith(("qwen3_moe", "qwen2_moe", "mixtral", "deepseek", "gpt_oss"))]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("planning")
    return four_ranks.run("planning_worker", directory)


@pytest.mark.parametrize("case", KEYS)
def test_weights_gradients_masters_and_moments_of_every_rank(findings: Any, case: str) -> None:
    held, predicted = findings[case]["state"]
    assert predicted == held
    assert all(state["moments"] > 0 for state in held)


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("kind", ["frozen", "by_layer"])
def test_a_frozen_model(findings: Any, case: str, kind: str) -> None:
    held, predicted = findings[case][kind]
    assert predicted == held


@pytest.mark.parametrize("case", KEYS)
def test_a_checkpoint(findings: Any, case: str) -> None:
    written, predicted = findings[case]["checkpoint"]
    assert predicted == written


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("what", ["received", "sent", "local"])
def test_what_a_sync_moves(findings: Any, case: str, what: str) -> None:
    planned, predicted = findings[case][what]
    assert predicted == planned


@pytest.mark.parametrize("case", DENSE)
def test_buffers_are_bounded_by_the_prediction(findings: Any, case: str) -> None:
    used, predicted = findings[case]["buffers"]
    assert used <= predicted <= 2 * 2 * 20_000
    assert (used > 0) == ("dp4" not in case)  # where every rank has everything, nothing travels


@pytest.mark.parametrize("case", KEYS)
def test_sizes_from_config_json_are_those_of_the_model(findings: Any, case: str) -> None:
    of_model, from_json = findings[case]["geometry"]
    assert from_json == of_model
