"""The optimizer's state in checkpoints: the same bits in Hugging Face coordinates whatever the layout that wrote and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.state_worker import BIAS_RATE, CIRCLES, MUON, STEPS_BEFORE
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("state")
    return four_ranks.run("state_worker", directory)


@pytest.mark.parametrize("model", CIRCLES)
def test_weights_and_moments_go_round_the_layouts_bit_for_bit(findings: Any, model: str) -> None:
    found = findings["circles"][model]
    stations = len(CIRCLES[model]) + 1
    assert found["moments"] == [""] * stations
    assert found["weights"] == [""] * stations
    assert found["steps"] == [STEPS_BEFORE] * (stations - 1)
    assert found["moved"] > 0
    assert found["synced"] == ""


def test_biases_of_experts_move_by_their_rate_and_are_saved(findings: Any) -> None:
    """Three layers behind the dense one, two updates: the furthest of each moves both times in one direction.

    A bias, which is below 1, is rounded after each by up to 2**-25, which way depends on the bias; twice that is allowed.
    """
    moved = pytest.approx(STEPS_BEFORE * BIAS_RATE, abs=STEPS_BEFORE * 2**-24)
    assert findings["circles"]["deepseek_v3"]["biases"] == [moved] * 3


@pytest.mark.parametrize("model", CIRCLES)
def test_an_update_by_muon_is_one_of_whole_matrices(findings: Any, model: str) -> None:
    """Queries, keys, values, gates and every expert apart, whatever Megatron and the layout have made of them."""
    found = findings["circles"][model]["muon"]
    assert len(found) == (4 * (4 + 1 + 4 * 3) if model in MUON else 0), sorted(found)
    assert all(difference < 1e-3 for difference in found.values()), found


@pytest.mark.parametrize("model", CIRCLES)
def test_the_next_step_is_that_of_the_run_that_went_on(findings: Any, model: str) -> None:
    found = findings["circles"][model]
    for layout, metrics in found["resumed"].items():
        assert metrics["loss/total"] == pytest.approx(found["uninterrupted"]["loss/total"], rel=1e-5), layout
        assert metrics["actor/grad_norm"] == pytest.approx(found["uninterrupted"]["actor/grad_norm"], rel=1e-5), layout


@pytest.mark.parametrize("model", CIRCLES)
def test_at_the_first_layout_again_the_next_step_is_the_same_bits(findings: Any, model: str) -> None:
    found = findings["circles"][model]
    *_, last = found["resumed"].values()
    assert {n: v for n, v in last.items() if n != "actor/lr"} == {
        n: v for n, v in found["uninterrupted"].items() if n != "actor/lr"
    }
    assert found["after_the_circle"] == ""


def test_every_rank_writes_its_part(findings: Any) -> None:
    for found in findings["circles"].values():
        assert found["files"][0] == ["index.json", *(f"state-0000{rank}.safetensors" for rank in range(4))]


def test_the_size_of_a_save_is_known_before_it(findings: Any) -> None:
    for found in findings["circles"].values():
        expected, written = found["size"]
        assert expected == pytest.approx(written, rel=0.1), found["size"]


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
    assert all("are not its fp32 master weights in training/, rounded" in message for message in findings["mixed"][:4])
    assert all("no master of tensor" in message for message in findings["mixed"][4:])


@pytest.mark.parametrize("model", CIRCLES)
def test_transformers_makes_the_trainers_model_of_a_checkpoint(findings: Any, model: str) -> None:
    assert findings["circles"][model]["logprob_difference"] < 2e-5


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
