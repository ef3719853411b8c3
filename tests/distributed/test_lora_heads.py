"""Compare adapters and heads of reward models and critics under every layout with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.beside import needs
from tests.distributed.cells import check_all, check_close
from tests.distributed.lora_head_worker import KINDS
from tests.distributed.world import World

pytestmark = needs("peft", "accelerate")
LOSSES = {"sequence": "loss/reward_model", "token": "loss/value"}


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("lora_heads")
    return four_ranks.run("lora_head_worker", directory)


def updates_of(findings: Any, head: str) -> dict[str, Any]:
    return {name: found for name, found in findings["updates"].items() if name.startswith(f"{head}/")}


@pytest.mark.parametrize("head", KINDS)
def test_an_update_is_that_of_peft(findings: Any, head: str) -> None:
    oracle = findings["oracle"][head]

    def check(found: Any) -> None:
        check_close("loss", found["metrics"][LOSSES[head]], oracle["loss"], rel=1e-5)
        check_close("norm of the gradient", found["metrics"][f"{head}/grad_norm"], oracle["norm"], rel=1e-5)
        assert found["after"] == ""
        assert found["base"] == "", "the weights are as they were"

    check_all(updates_of(findings, head), check)


@pytest.mark.parametrize("head", KINDS)
def test_the_optimizer_keeps_state_of_adapters_and_the_head(findings: Any, head: str) -> None:
    tensors = ["score.bias", "score.weight"] if head == "token" else ["score.weight"]

    def check(found: Any) -> None:
        assert found["heads"] == [f"base_model.model.{name}" for name in tensors]
        kept = {name for names in found["state"] for name in names}
        assert kept == {"lora_a", "lora_b", *(name.rpartition(".")[2] for name in tensors)}

    check_all(updates_of(findings, head), check)


def test_a_plan_counts_every_byte(findings: Any) -> None:
    def check(found: Any) -> None:
        live, planned = found["bytes"]
        for of_rank, of_plan in zip(live, planned, strict=True):
            assert of_plan == pytest.approx(of_rank, rel=0.05)

    check_all(findings["updates"], check)
