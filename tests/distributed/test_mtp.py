"""MTP layers learn what transformers' layers learn, and the rest of the model learns what it learns without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.mtp_worker import CASES, CIRCLE, JOINT
from tests.distributed.setting import NOISE
from tests.distributed.world import World

ALL = [f"{model}/{layout}" for model, layouts in CASES.items() for layout in layouts]
OWN = ("actor/mtp_loss", "actor/mtp_grad_norm")


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("mtp")
    return four_ranks.run("mtp_worker", directory)


@pytest.mark.parametrize("case", ALL)
def test_mtp_layers_learn_as_those_of_transformers_row_by_row(findings: Any, case: str) -> None:
    found, oracle = findings["alone"][case], findings["oracle"][case.partition("/")[0]]
    assert found["metrics"]["actor/mtp_loss"] == pytest.approx(oracle["mtp_loss"], rel=1e-5)
    assert found["metrics"]["actor/mtp_grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert oracle["grad_norm"] > 0.5, "it is clipped"
    assert found["mtp"] == ""


@pytest.mark.parametrize("case", ALL)
def test_the_policy_learns_the_same_as_without_mtp_layers(findings: Any, case: str) -> None:
    """The norm is a sum over shards of the optimizer, which are others."""
    found, norm = findings["alone"][case], "actor/grad_norm"
    assert found["metrics"].pop(norm) == pytest.approx(found["plain"].pop(norm), rel=NOISE)
    assert {name: value for name, value in found["metrics"].items() if name not in OWN} == found["plain"]
    assert found["trunk"] == "" and found["copies"] == ""
    assert found["sent"] == "", "what an engine that loads whole tensors is sent"


@pytest.mark.parametrize("layout", JOINT)
def test_on_given_responses_all_of_the_model_learns_from_both_losses(findings: Any, layout: str) -> None:
    found, oracle = findings["joint"][layout], findings["oracle"]["joint"]
    assert found["loss/sft"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/mtp_loss"] == pytest.approx(oracle["mtp_loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == "" and found["copies"] == ""


def test_trained_mtp_layers_go_round_the_layouts_bit_for_bit(findings: Any) -> None:
    found, stations = findings["circle"], len(CIRCLE) + 1
    assert found["moments"] == [""] * stations and found["weights"] == [""] * stations
    assert found["names"] == [], "a checkpoint has the tensors of the model that it came from"
    assert found["repeated"] == [True, True] and found["count"] == 1
    held, predicted = found["bytes"]
    for rank in range(len(held)):
        assert predicted[rank] == pytest.approx(held[rank], rel=0.05), "as planned"
    assert found["moved"] > 0 and found["synced"] == ""
    for metrics in found["resumed"].values():
        for name in ("loss/total", "actor/grad_norm", *OWN):
            assert metrics[name] == pytest.approx(found["uninterrupted"][name], rel=1e-5), name
    *_, last = found["resumed"].values()
    assert last == found["uninterrupted"]
