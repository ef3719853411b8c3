"""The logprob that the engine reports for a token is the trainer's and transformers', whatever the layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.setting import LAYOUTS
from tests.distributed.world import run_world
from tests.e2e.three_way_worker import ENGINE_TP, generates


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("../e2e/three_way_worker.py", 4, tmp_path_factory.mktemp("three_way"))


@pytest.mark.parametrize(("model", "layout"), [(m, la) for m in ENGINE_TP for la in LAYOUTS if generates(m, la)])
def test_engine_trainer_and_transformers_agree(findings: Any, model: str, layout: str) -> None:
    found = findings[f"{model}/{layout}"]
    assert found["trainer"] < 1e-4
    assert found["transformers"] < 1e-4
    assert found["num_trajectories"] == 8
    assert found["version"] == 2 * list(LAYOUTS).index(layout) + 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ENGINE_TP)
def test_a_planned_sync_leaves_the_engine_as_the_baseline_does(findings: Any, model: str, layout: str) -> None:
    found = findings[f"{model}/{layout}"]
    assert found["equal"] == 1
    assert found["live"] == 1
    if "pp" in layout:  # without a pipeline little has to move, or nothing
        assert found["num_buckets"] > 3, "buckets must be smaller than the model"
    assert found["excess_bytes"] == 0
    assert found["peak_share"] <= 1
    assert (found["peak_share"] > 0) == (found["received_bytes"] > 0)


def test_nothing_is_generated_after_a_torn_sync(findings: Any) -> None:
    assert "the wire is cut" in findings["faults"]["torn"]
    assert "cannot generate" in findings["faults"]["torn"]


def test_weights_come_back(findings: Any) -> None:
    assert findings["faults"]["restored"] is True
    assert findings["faults"]["changed"] is True


def test_a_changed_element_is_noticed(findings: Any) -> None:
    assert (
        "differ after the sync" in findings["faults"]["tampered"]
        or "holds other values" in findings["faults"]["tampered"]
    )
