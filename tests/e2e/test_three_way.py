"""Check that engine, trainer and transformers compute the same logprob for a token, whatever the layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.three_way_cases import DELTA_NETS, ENGINES, GRIDS, Width, generates, layouts

NOISE = {"deepseek_v3_heads": 0.3}  # 0.11 measured


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.three_way_worker", 4, tmp_path_factory.mktemp("three_way"))


@pytest.mark.parametrize(("model", "tp"), ENGINES)
def test_engine_trainer_and_transformers_agree(findings: Any, model: str, tp: Width) -> None:
    """Every trainer layout syncs its weights to the engine."""
    checked = 0
    for number, layout in enumerate(layouts(model)):
        if generates(layout, tp):
            found, checked = findings[f"{model}/{tp}/{layout}"], checked + 1
            if model in DELTA_NETS:  # the bound is transformers' own error in bf16
                assert 0 < found["error_of_engine"] <= 1.5 * found["error_of_bf16"], layout
                assert 0 < found["error_of_trainer"] <= 1.5 * found["error_of_bf16"], layout
            else:
                assert found["trainer"] < NOISE.get(model, 1e-4), layout
                assert found["transformers"] < NOISE.get(model, 1e-4), layout
            assert (found["num_trajectories"], found["version"]) == (8, 3 * number + 2), layout
    assert checked


@pytest.mark.parametrize(("model", "tp"), ENGINES)
def test_a_planned_sync_leaves_the_engine_as_the_baseline_does(findings: Any, model: str, tp: Width) -> None:
    """Every trainer layout is compared."""
    for layout in layouts(model):
        found = findings[f"{model}/{tp}/{layout}"]
        assert found["difference"] == "" and found["same_words"] == 1, layout
        assert found["live"] == 1, layout
        if "pp" in layout:  # without a pipeline, little or nothing is moved
            assert found["num_buckets"] > 3, f"{layout}: buckets must be smaller than the model"
        assert found["excess_bytes"] == 0, layout
        assert found["peak_share"] <= 1, layout
        assert (found["peak_share"] > 0) == (found["received_bytes"] > 0), layout


@pytest.mark.parametrize(("model", "tp"), [case for case in ENGINES if case[0] in DELTA_NETS or case[1] in GRIDS])
def test_the_planner_describes_what_an_engine_holds(findings: Any, model: str, tp: Width) -> None:
    assert findings[f"{model}/{tp}"] == ""


def test_fault_20_nothing_is_generated_after_a_torn_sync(findings: Any) -> None:
    assert "the wire is cut" in findings["faults"]["torn"]
    assert "cannot generate" in findings["faults"]["torn"]


def test_weights_come_back(findings: Any) -> None:
    for first, other, again in (findings["faults"]["outputs"], findings["faults"]["digests"]):
        assert again == first
        assert other != first


def test_a_changed_element_is_noticed(findings: Any) -> None:
    assert (
        "differ after the sync" in findings["faults"]["tampered"]
        or "differ from earlier ranks" in findings["faults"]["tampered"]
    )


def test_a_sync_of_some_tensors_brings_these_alone(findings: Any) -> None:
    found = findings["faults"]
    brought, loaded = found["some_brought"]
    assert brought == loaded
    assert found["some_bytes"] < found["all_bytes"] / 10


@pytest.mark.parametrize("kind", [0, 1], ids=["fp8", "int8"])
@pytest.mark.parametrize("engine", ["qwen3_seven/2", *(f"{model}/{tp}" for model, tp in ENGINES if tp in GRIDS)])
def test_weights_that_came_in_8_bits_are_their_values(findings: Any, kind: int, engine: str) -> None:
    """Trainer and engine both split the blocks and rows of the models. vLLM packs the layers."""
    brought, loaded = findings[f"{engine}/8 bits"][kind]
    assert brought == loaded
    assert brought != findings[f"{engine}/8 bits"][1 - kind][0]


def test_the_canary_notices_a_sync_that_brought_nothing(findings: Any) -> None:
    found = findings["faults"]
    assert "differ from the trainer's" in found["canary"]
    assert found["dropped"] == -1
    assert found["agreed"] == 13
