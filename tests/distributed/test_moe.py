"""Experts on four ranks, dealt and cut in every way that fits, say, keep and learn what they do in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.moe_worker import BALANCED, CUTS, CUTS_OF, SAVED_LAYOUTS
from tests.distributed.setting import MOE_LAYOUTS, NOISE, load_hf
from tests.distributed.test_update import check_old_of_update, check_small_steps
from tests.distributed.world import World, run_world


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="module")
def findings(four_ranks: World, directory: Path) -> Any:
    return four_ranks.run("moe_worker", directory)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("model", models.MOE_MODELS)
def test_logprobs_and_entropy_equal_transformers(findings: Any, model: str, layout: str, kind: str) -> None:
    logprobs, entropy = findings["parity"][f"{model}/{layout}/{kind}"]
    assert logprobs < NOISE
    assert entropy < 1e-4


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("model", models.MOE_MODELS)
def test_gathered_weights_are_the_files_bit_for_bit(findings: Any, model: str, layout: str) -> None:
    assert findings["gather"][f"{model}/{layout}"] == ""


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize("model", models.MOE_MODELS)
def test_layouts_say_which_parameters_a_rank_has(findings: Any, model: str, layout: str) -> None:
    for held, predicted in findings["names"][f"{model}/{layout}"]:
        assert held == predicted


@pytest.mark.parametrize("layout", SAVED_LAYOUTS)
@pytest.mark.parametrize("model", models.MOE_MODELS)
def test_a_saved_directory_is_the_one_it_came_from(findings: Any, directory: Path, model: str, layout: str) -> None:
    original = load_file(directory / model / "model.safetensors")
    saved: dict[str, torch.Tensor] = {}
    for shard in (directory / f"{model}_{layout}_saved").glob("*.safetensors"):
        saved.update(load_file(shard))
    assert first_difference(saved, original) == ""
    loaded, expected = load_hf(directory / f"{model}_{layout}_saved"), load_hf(directory / model)
    assert first_difference(loaded.state_dict(), expected.state_dict()) == ""


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
@pytest.mark.parametrize(("model", "cut"), [(model, cut) for model, cuts in CUTS_OF.items() for cut in cuts])
def test_loss_gradient_and_new_weights_are_the_oracles(findings: Any, model: str, layout: str, cut: str) -> None:
    check_update(findings, model, layout, cut)


@pytest.mark.matrix
def test_every_cut_of_every_model(tmp_path: Path) -> None:
    findings = run_world("distributed.moe_worker", 4, tmp_path, "every cut")
    for model in CUTS_OF:
        for layout in MOE_LAYOUTS:
            for cut in CUTS:
                check_update(findings, model, layout, cut)


def check_update(findings: Any, model: str, layout: str, cut: str) -> None:
    found, oracle = findings["updates"][f"{model}/{layout}/{cut}"], findings["oracle"][model]
    assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert found["losses"] == [found["loss/total"]] * 4
    assert "actor/load_balance" not in found


@pytest.mark.parametrize("kind", ["packed", "padded", "recomputed"])
@pytest.mark.parametrize("layout", BALANCED)
def test_load_balancing_is_that_of_switch_transformers_on_every_layout(findings: Any, layout: str, kind: str) -> None:
    found, plain = findings["balance"][f"{layout}/{kind}"], findings["oracle"]["qwen3_moe_mixed"]
    oracle = findings["oracle"][f"balanced/{found['dp']}"]
    assert abs(oracle["grad_norm"] - plain["grad_norm"]) > 1e-2 * plain["grad_norm"], "the loss must be felt"
    assert found["actor/load_balance"] == pytest.approx(oracle["extra"], rel=1e-5)
    assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_old_logprobs_of_the_update_itself_are_those_of_a_pass_before_it(findings: Any, layout: str) -> None:
    check_old_of_update(findings["old"][layout])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_small_steps_add_up_in_fp32_masters(findings: Any, dtype: str) -> None:
    check_small_steps(findings["precision"][dtype])
