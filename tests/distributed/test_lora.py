"""Adapters learn in every layout what they learn in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_below, check_close
from tests.distributed.lora_worker import LAYOUTS, RECOMPUTE
from tests.distributed.setting import NOISE
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("lora")
    return four_ranks.run("lora_worker", directory)


def check(found: Any, oracle: Any) -> None:
    check_below("difference of logprobs", found["logprobs"], NOISE)
    check_below("difference of the reference's logprobs", found["reference"], NOISE)
    check_close("loss/sft", found["metrics"]["loss/sft"], oracle["loss/sft"], abs_=NOISE)
    check_close("actor/grad_norm", found["metrics"]["actor/grad_norm"], oracle["actor/grad_norm"], rel=NOISE)
    assert found["after"] == "" and found["moved"] > 1e-3
    assert found["base"] == "", "the weights are as they were"
    assert found.get("sent", "") == "", "what engines get"


def check_shards(found: Any, has_magnitudes: bool) -> None:
    shards = {name.rstrip("0123456789") for names in found["shards"] for name in names}
    assert shards == {"lora_a", "lora_b", *(["lora_m"] if has_magnitudes else [])}


@pytest.mark.parametrize("model", LAYOUTS)
def test_logprobs_and_an_update_are_those_of_peft(findings: Any, model: str) -> None:
    updates, oracle = findings[model]["updates"], findings[model]["oracle"]
    check_all(list(updates), lambda name: check(updates[name], oracle[name.partition("/")[2]]))
    assert all(("sent" in found) == model.endswith("_dora") for found in updates.values())


@pytest.mark.parametrize("model", LAYOUTS)
def test_the_optimizer_keeps_state_of_adapters_alone(findings: Any, model: str) -> None:
    check_all(findings[model]["updates"], lambda found: check_shards(found, model.endswith("_dora")))


def test_layers_that_are_computed_again_have_the_same_gradients(findings: Any) -> None:
    assert findings["recompute"].keys() == RECOMPUTE.keys()
    check_all(findings["recompute"], lambda found: check(found, findings["qwen3"]["oracle"]["grown"]))


@pytest.mark.parametrize("layout", ["tp2_dp2", "tp2_dp2_sp"])
def test_what_is_dropped_follows_from_the_generators_alone(findings: Any, layout: str) -> None:
    found = findings["dropout"][layout]
    first, second, computed_again, nothing_dropped = found["norms"]
    assert first == second
    assert computed_again == pytest.approx(first, rel=1e-6)
    assert abs(nothing_dropped - first) > 1e-3 * first
    assert found["finite"]


def test_new_adapters_have_the_same_values_in_every_layout(findings: Any) -> None:
    one, other = (findings["initial"][layout] for layout in ("dp4", "tp2_pp2"))
    assert one == other
    assert 0.9 < one["largest"] <= 1.0, "uniform up to the root of one over the inputs"
    assert one["b"] == 0.0
