"""Experts on four ranks, split in every way that fits, compute, keep and learn what they do in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.cells import check_all, check_below, check_close
from tests.distributed.setting import NOISE, load_hf
from tests.distributed.test_update import check_old_of_update, check_small_steps, check_update
from tests.distributed.world import World

EVERY_MODEL = pytest.mark.parametrize("model", models.MOE_MODELS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def findings(four_ranks: World, directory: Path) -> Any:
    return four_ranks.run("moe_worker", directory)


def cells_of(findings: Any, model: str) -> dict[str, Any]:
    return {name: found for name, found in findings["cells"].items() if name.startswith(f"{model}/")}


@EVERY_MODEL
def test_logprobs_and_entropy_are_those_of_transformers(findings: Any, model: str) -> None:
    def check(found: Any) -> None:
        logprobs, entropy = found["parity"]
        check_below("difference of logprobs", logprobs, NOISE)
        check_below("difference of entropies", entropy, 1e-4)

    check_all(cells_of(findings, model), check)


@EVERY_MODEL
def test_gathered_weights_are_the_files_bit_for_bit(findings: Any, model: str) -> None:
    def check(found: Any) -> None:
        assert found["gather"] == ""

    check_all(cells_of(findings, model), check)


@EVERY_MODEL
def test_layouts_predict_which_parameters_a_rank_has(findings: Any, model: str) -> None:
    def check(found: Any) -> None:
        for held, predicted in found["names"]:
            assert held == predicted

    check_all(cells_of(findings, model), check)


@EVERY_MODEL
def test_a_saved_directory_is_the_one_it_came_from(findings: Any, directory: Path, model: str) -> None:
    original, expected = load_file(directory / model / "model.safetensors"), load_hf(directory / model).state_dict()

    def check(name: str) -> None:
        folder, saved = directory / f"{name.replace('/', '_')}_saved", dict[str, torch.Tensor]()
        for shard in folder.glob("*.safetensors"):
            saved.update(load_file(shard))
        assert first_difference(saved, original) == ""
        assert first_difference(load_hf(folder).state_dict(), expected) == ""

    check_all(list(cells_of(findings, model)), check)


@EVERY_MODEL
def test_an_update_is_that_of_transformers(findings: Any, model: str) -> None:
    def check(found: Any) -> None:
        check_update(found["update"], findings["oracle"][model])
        assert "actor/load_balance" not in found["update"]

    check_all(cells_of(findings, model), check)


def test_load_balancing_is_that_of_switch_transformers(findings: Any) -> None:
    plain = findings["oracle"]["qwen3_moe_mixed"]

    def check(found: Any) -> None:
        oracle = findings["oracle"][found["oracle"]]
        assert abs(oracle["grad_norm"] - plain["grad_norm"]) > 1e-2 * plain["grad_norm"], "the loss must be felt"
        check_close("actor/load_balance", found["actor/load_balance"], oracle["extra"], rel=1e-5)
        check_update(found, oracle)

    check_all(findings["balance"], check)


def test_old_logprobs_of_the_update_itself_are_those_of_a_pass_before_it(findings: Any) -> None:
    check_all(findings["old"], check_old_of_update)


def test_small_steps_add_up_in_fp32_masters(findings: Any) -> None:
    check_all(findings["precision"], check_small_steps)
