"""Compare vLLM with transformers on images. vLLM's code of these models imports torchvision (docs/guide/images.md)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.beside import link, needs
from tests.distributed.world import run_world

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
pytestmark = needs("torchvision")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(link(tmp_path_factory.mktemp("packages"), "torchvision")), prepend=os.pathsep)
        return run_world("e2e.rollout.images_worker", 1, tmp_path_factory.mktemp("images"), *FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(findings: Any, family: str) -> None:
    """Prompts have one image, two images or none. A second pass reads them from the caches."""
    found = findings[family]
    assert sorted(found["images"]) == [0, 1, 1, 1, 1, 2] and found["drawn"] > 40
    assert found["gap"] < 1e-5 and found["gap again"] < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_tower_sees_the_images_anew(findings: Any, family: str) -> None:
    """After a sync of the tower, vLLM does not reuse the cached outputs of the old tower."""
    found = findings[family]
    assert found["gap after a sync"] < 1e-5 < 1e-3 < found["moved by the sync"]
