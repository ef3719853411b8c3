"""The logprob that the engine reports for a token is the trainer's and transformers', whatever the layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.models import MODELS
from tests.distributed.setting import LAYOUTS
from tests.distributed.world import run_world


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("../e2e/three_way_worker.py", 4, tmp_path_factory.mktemp("three_way"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_engine_trainer_and_transformers_agree(findings: Any, model: str, layout: str) -> None:
    found = findings[f"{model}/{layout}"]
    assert found["trainer"] < 1e-4
    assert found["transformers"] < 1e-4
    assert found["num_trajectories"] == 12
    assert found["version"] == list(LAYOUTS).index(layout)
