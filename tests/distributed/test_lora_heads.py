"""Adapters of a reward model and of a critic learn in every layout what they learn in PEFT, and their heads learn beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.beside import needs
from tests.distributed.lora_head_worker import KINDS, LAYOUTS
from tests.distributed.world import World

pytestmark = needs("peft", "accelerate")
ALL = [f"{head}/{layout}" for head in KINDS for layout in LAYOUTS]
LOSSES = {"sequence": "loss/reward_model", "token": "loss/value"}


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("lora_heads")
    return four_ranks.run("lora_head_worker", directory)


@pytest.mark.parametrize("case", ALL)
def test_an_update_is_that_of_peft(findings: Any, case: str) -> None:
    head = case.partition("/")[0]
    found, oracle = findings["updates"][case], findings["oracle"][head]
    assert found["metrics"][LOSSES[head]] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["metrics"][f"{head}/grad_norm"] == pytest.approx(oracle["norm"], rel=1e-5)
    assert found["after"] == ""
    assert found["base"] == "", "the weights are as they were"


@pytest.mark.parametrize("case", ALL)
def test_the_optimizer_keeps_state_of_adapters_and_the_head(findings: Any, case: str) -> None:
    tensors = ["score.bias", "score.weight"] if case.startswith("token") else ["score.weight"]
    assert findings["updates"][case]["heads"] == [f"base_model.model.{name}" for name in tensors]
    kept = {name for names in findings["updates"][case]["state"] for name in names}
    assert kept == {"lora_a", "lora_b", *(name.rpartition(".")[2] for name in tensors)}


@pytest.mark.parametrize("case", ALL)
def test_a_plan_counts_every_byte(findings: Any, case: str) -> None:
    live, planned = findings["updates"][case]["bytes"]
    assert live == planned
