"""Adapters learn in every layout what they learn in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.lora_worker import BEGINNINGS, CASES, RECOMPUTE
from tests.distributed.setting import NOISE
from tests.distributed.world import World

ALL = [f"{model}/{layout}/{b}" for model, layouts in CASES.items() for layout in layouts for b in BEGINNINGS]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("lora")
    return four_ranks.run("lora_worker", directory)


def check(found: Any, oracle: Any) -> None:
    assert found["logprobs"] < NOISE and found["reference"] < NOISE
    assert found["metrics"]["loss/sft"] == pytest.approx(oracle["loss/sft"], abs=NOISE)
    assert found["metrics"]["actor/grad_norm"] == pytest.approx(oracle["actor/grad_norm"], rel=NOISE)
    assert found["after"] == "" and found["moved"] > 1e-3
    assert found["base"] == "", "the weights are as they were"


@pytest.mark.parametrize("case", ALL)
def test_logprobs_and_an_update_are_those_of_peft(findings: Any, case: str) -> None:
    model, _, beginning = case.split("/")
    check(findings["updates"][case], findings["oracle"][f"{model}/{beginning}"])


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_layers_that_are_computed_again_have_the_same_gradients(findings: Any, kind: str) -> None:
    check(findings["recompute"][kind], findings["oracle"]["qwen3/grown"])


@pytest.mark.parametrize("case", ALL)
def test_the_optimizer_keeps_state_of_adapters_alone(findings: Any, case: str) -> None:
    assert {name for names in findings["updates"][case]["shards"] for name in names} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("layout", ["tp2_dp2", "tp2_dp2_sp"])
def test_what_is_dropped_follows_from_the_generators_alone(findings: Any, layout: str) -> None:
    first, second, computed_again, nothing_dropped = findings["dropout"][layout]["norms"]
    assert first == second
    assert computed_again == pytest.approx(first, rel=1e-6)
    assert abs(nothing_dropped - first) > 1e-3 * first
    assert findings["dropout"][layout]["finite"]


def test_new_adapters_have_the_same_values_in_every_layout(findings: Any) -> None:
    one, other = findings["initial"]["dp4"], findings["initial"]["tp2_pp2"]
    assert one == other
    assert 0.9 < one["largest"] <= 1.0, "uniform up to the root of one over the inputs"
    assert one["b"] == 0.0
