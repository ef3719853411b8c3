"""Compare models that read images on four ranks with transformers: logprobs, weights and updates."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.setting import NOISE
from tests.distributed.vision_kinds_worker import KINDS, LAYOUTS
from tests.distributed.vision_worker import FEW, GRIDS, ROWS
from tests.distributed.world import World

CASES = [(model, layout) for model in FEW for layout in FEW[model]]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return four_ranks.run("vision_worker", tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logprobs_are_those_of_transformers_and_weights_make_the_way_back(
    findings: Any, model: str, layout: str
) -> None:
    found = findings[f"{model}/{layout}"]
    assert found["packed"] < NOISE
    assert found["padded"] < NOISE
    assert found["gather"] == found.get("saved", "") == ""
    for held, predicted in found["names"]:
        assert held == predicted


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_plans_count_a_tower_as_it_is_trained(findings: Any, model: str, layout: str) -> None:
    """Weights and gradients of each rank. Frozen weights have no gradients."""
    for weights, gradients, *planned in findings[f"{model}/{layout}"]["memory"]:
        assert planned == pytest.approx([weights, gradients], rel=0.05)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_an_update_is_that_of_transformers(findings: Any, model: str, layout: str) -> None:
    """Train all weights, then decoder and merger, then all weights with recomputation, then only the decoder."""
    found = findings[f"{model}/{layout}"]["update"]
    assert found["grad_norm"] == pytest.approx(found["oracle"], rel=1e-5)
    assert found["weights"] == ""


@pytest.fixture(scope="module")
def kinds(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return four_ranks.run("vision_kinds_worker", tmp_path_factory.mktemp("vision_kinds"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", LAYOUTS)
def test_an_update_on_given_responses_to_images_is_that_of_transformers(kinds: Any, model: str, kind: str) -> None:
    """Fine-tuning, DPO and a reward model train all weights, including the tower."""
    found, oracle = kinds[f"{model}/{kind}"]["found"], kinds[f"{model}/{kind}"]["oracle"]
    assert found["loss"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""


@pytest.mark.parametrize("model", LAYOUTS)
def test_a_frozen_tower_reads_an_image_once_in_a_step_on_one_rank(kinds: Any, model: str) -> None:
    """All four ranks, or two of the first stage, have the same rows.

    The reference comes first, and its tower equals the policy's.
    """
    images = {name for names, _ in ROWS for name in names}
    patches = sum(rows * columns for _, rows, columns in (GRIDS[name] for name in images))
    assert patches == 24 + 4 + 40
    assert kinds[f"{model}/patches"] == {"policy": [0, 0], "reference": [patches, 2 * patches]}
