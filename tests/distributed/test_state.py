"""The optimizer's state in checkpoints: the same bits in Hugging Face coordinates whatever the layout that wrote and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_below, check_close
from tests.distributed.state_worker import BIAS_RATE, CIRCLES, STEPS_BEFORE
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("state")
    return four_ranks.run("state_worker", directory)


@pytest.mark.parametrize("model", CIRCLES)
def test_weights_and_state_go_round_the_layouts(findings: Any, model: str) -> None:
    check_circle(findings["circles"][model], CIRCLES[model])


def check_circle(found: Any, layouts: tuple[str, ...]) -> None:
    """Train and save, then on each layout: load, save again, and make the next step. The last layout is the first one."""
    stations = len(layouts) + 1
    assert found["moments"] == [""] * stations, "bit for bit"
    assert found["weights"] == [""] * stations, "bit for bit"
    assert found["steps"] == [STEPS_BEFORE] * (stations - 1)
    assert found["moved"] > 0
    assert found["synced"] == "", "what an engine gets"
    check_below("difference to the logprobs of transformers", found["logprob_difference"], 2e-5)
    for layout, metrics in found["resumed"].items():
        for name in ("loss/total", "actor/grad_norm"):
            check_close(f"{layout}: {name}", metrics[name], found["uninterrupted"][name], rel=1e-5)
    *_, last = found["resumed"].values()
    assert {n: v for n, v in last.items() if n != "actor/lr"} == {
        n: v for n, v in found["uninterrupted"].items() if n != "actor/lr"
    }, "the same bits at the first layout"
    assert found["after_the_circle"] == ""
    assert found["files"][0] == ["index.json", *(f"state-0000{rank}.safetensors" for rank in range(4))]
    expected, written = found["size"]
    assert expected == pytest.approx(written, rel=0.1), "the size of a save is known before it"


def test_biases_of_experts_move_by_their_rate_and_are_saved(findings: Any) -> None:
    """Three layers behind the dense one, two updates: the furthest of each moves both times in one direction.

    A bias, which is below 1, is rounded after each by up to 2**-25, which way depends on the bias; twice that is allowed.
    """
    moved = pytest.approx(STEPS_BEFORE * BIAS_RATE, abs=STEPS_BEFORE * 2**-24)
    assert findings["circles"]["deepseek_v3"]["biases"] == [moved] * 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_runs_go_on_from_their_fp32_masters(findings: Any, dtype: str) -> None:
    found = findings["precision"][dtype]
    assert found["kinds"] == ["master", "exp_avg", "exp_avg_sq"]
    assert found["weights"] == "" and found["state"] == ""
    assert found["metrics"][0] == found["metrics"][1]
    assert found["scalars"][0] == found["scalars"][1]
    assert (found["scalars"][0]["loss_scale"] is not None) == (dtype == "fp16")


def test_before_the_first_update_zeros_are_saved_and_change_nothing(findings: Any) -> None:
    assert findings["untrained"]["state"] == ""
    with_save, without = findings["untrained"]["metrics"]
    assert with_save == without


def test_weights_and_state_that_do_not_belong_together_are_refused(findings: Any) -> None:
    assert all(
        "differ from its rounded fp32 master weights in training/" in message for message in findings["mixed"][:4]
    )
    assert all("has no master; keep model.dtype" in message for message in findings["mixed"][4:])


@pytest.mark.parametrize("which", ["gradient", "loss"])
def test_fault_23_all_ranks_skip_an_update_that_is_not_finite_on_one(findings: Any, which: str) -> None:
    found = findings["not_finite"][which]
    assert found["skipped"] == [[1.0, 1.0]] * 4 and found["changed"] == ""
    assert found["made"] == [[0.0, 0.0]] * 4
    assert found["loss"] == findings["untrained"]["metrics"][1]["loss/total"], "the next one begins where that one did"


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "master"])
def test_fault_23_all_ranks_learn_of_a_nan_in_the_state_of_one(findings: Any, kind: str) -> None:
    found = findings["spoiled"][kind]
    assert 0 < found["grad_norm"] < float("inf"), "the gradient shows nothing"
    assert found["sound"] == [False] * 4 and found["spoiled"] == [1.0] * 4
    assert found["may_be_saved"].count(False) == 1, "of the rank that holds it"
