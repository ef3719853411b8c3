"""Adapters learn in every layout what they learn in PEFT."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.lora_worker import CASES, RECOMPUTE, cases
from tests.distributed.setting import NOISE
from tests.distributed.world import World

ALL = [(model, layout, beginning) for model in CASES for layout, beginning in cases(model)]
EVERY = pytest.mark.parametrize(("model", "layout", "beginning"), ALL)


@pytest.fixture(scope="module")
def findings_of(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What the ranks find out about a model, run once."""
    return cache(lambda model: four_ranks.run("lora_worker", tmp_path_factory.mktemp("lora"), model))


def check(found: Any, oracle: Any) -> None:
    assert found["logprobs"] < NOISE and found["reference"] < NOISE
    assert found["metrics"]["loss/sft"] == pytest.approx(oracle["loss/sft"], abs=NOISE)
    assert found["metrics"]["actor/grad_norm"] == pytest.approx(oracle["actor/grad_norm"], rel=NOISE)
    assert found["after"] == "" and found["moved"] > 1e-3
    assert found["base"] == "", "the weights are as they were"


@EVERY
def test_logprobs_and_an_update_are_those_of_peft(findings_of: Any, model: str, layout: str, beginning: str) -> None:
    found = findings_of(model)
    check(found["updates"][f"{layout}/{beginning}"], found["oracle"][beginning])
    if model.endswith("_dora"):
        assert found["updates"][f"{layout}/{beginning}"]["sent"] == "", "what engines get"


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_layers_that_are_computed_again_have_the_same_gradients(findings_of: Any, kind: str) -> None:
    check(findings_of("qwen3")["recompute"][kind], findings_of("qwen3")["oracle"]["grown"])


@EVERY
def test_the_optimizer_keeps_state_of_adapters_alone(findings_of: Any, model: str, layout: str, beginning: str) -> None:
    shards = findings_of(model)["updates"][f"{layout}/{beginning}"]["shards"]
    assert {name for names in shards for name in names} == {
        "lora_a",
        "lora_b",
        *(["lora_m"] if "dora" in model else []),
    }


@pytest.mark.parametrize("layout", ["tp2_dp2", "tp2_dp2_sp"])
def test_what_is_dropped_follows_from_the_generators_alone(findings_of: Any, layout: str) -> None:
    found = findings_of("qwen3")["dropout"][layout]
    first, second, computed_again, nothing_dropped = found["norms"]
    assert first == second
    assert computed_again == pytest.approx(first, rel=1e-6)
    assert abs(nothing_dropped - first) > 1e-3 * first
    assert found["finite"]


def test_new_adapters_have_the_same_values_in_every_layout(findings_of: Any) -> None:
    one, other = (findings_of("qwen3")["initial"][layout] for layout in ("dp4", "tp2_pp2"))
    assert one == other
    assert 0.9 < one["largest"] <= 1.0, "uniform up to the root of one over the inputs"
    assert one["b"] == 0.0
