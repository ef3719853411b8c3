"""Trace the loaders of models that vLLM runs on GPUs only: sparse attention, and experts without gates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.bridge.gpu_models_worker import MODELS


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.bridge.gpu_models_worker", 2, tmp_path_factory.mktemp("gpu_models"))


@pytest.mark.parametrize("name", MODELS)
def test_replayed_pieces_are_what_load_weights_makes(findings: Any, name: str) -> None:
    for found in findings[name]:
        assert found["difference"] == "" and found["names"] == found["traced"]
        assert found["received"] == found["expected"]
        assert ("nvidia" in found["class"]) == (name != "nemotron_h")
