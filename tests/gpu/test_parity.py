"""Run the parity checks of the gloo tests on one GPU. Skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.world import run_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("gpu.parity_worker", 1, tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_tied"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_logprobs_equal_transformers(findings: Any, model: str, kind: str) -> None:
    assert findings[f"{model}/{kind}"] < 1e-3  # fp32, TF32 off
