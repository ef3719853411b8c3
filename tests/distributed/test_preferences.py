"""Learning from pairs under several layouts: every update is that of plain transformers and the loss written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.preference_worker import NUM_UPDATES, ways
from tests.distributed.world import World

WAYS = [(loss, layout) for loss, layout, _ in ways()]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("preferences")
    return four_ranks.run("preference_worker", directory)


@pytest.mark.parametrize(("loss", "layout"), WAYS)
def test_an_update_is_the_oracles(findings: Any, loss: str, layout: str) -> None:
    found, oracle = findings["updates"][f"{loss}/{layout}"], findings["oracle"][loss]
    assert len(found["history"]) == len(oracle) == NUM_UPDATES
    for mine, theirs in zip(found["history"], oracle, strict=True):
        assert mine["loss/dpo"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["actor/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name in theirs.keys() - {"loss", "grad_norm"}:
            assert mine[f"preference/{name}"] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    assert found["weights"] == ""
    assert loss != "kto" or oracle[1]["divergence"] > 0.01, "it has an effect"
    assert oracle[1]["loss"] < oracle[0]["loss"]


@pytest.mark.parametrize(("loss", "layout"), WAYS)
def test_held_out_figures_are_the_oracles(findings: Any, loss: str, layout: str) -> None:
    found, oracle = findings["updates"][f"{loss}/{layout}"]["before"], findings["oracle"][loss][0]
    assert found.keys() == {f"evaluate/{name}" for name in oracle.keys() - {"grad_norm", "divergence"}}
    for name, value in found.items():
        assert value == pytest.approx(oracle[name.removeprefix("evaluate/")], rel=1e-4, abs=1e-5), name
