"""Compare updates from preference pairs under several layouts with plain transformers and an explicit loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_close
from tests.distributed.preference_worker import LOSSES, NUM_UPDATES
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("preferences")
    return four_ranks.run("preference_worker", directory)


@pytest.mark.parametrize("loss", LOSSES)
def test_updates_and_held_out_figures_are_the_oracles(findings: Any, loss: str) -> None:
    oracle = findings["oracle"][loss]
    cells = {name: found for name, found in findings["updates"].items() if name.startswith(f"{loss}/")}

    def check(found: Any) -> None:
        assert len(found["history"]) == len(oracle) == NUM_UPDATES
        for mine, theirs in zip(found["history"], oracle, strict=True):
            check_close("loss/dpo", mine["loss/dpo"], theirs["loss"], rel=1e-5)
            check_close("actor/grad_norm", mine["actor/grad_norm"], theirs["grad_norm"], rel=1e-5)
            for name in theirs.keys() - {"loss", "grad_norm"}:
                check_close(name, mine[f"preference/{name}"], theirs[name], 1e-4, 1e-5)
        assert found["weights"] == ""

    def check_held_out(found: Any) -> None:
        names = oracle[0].keys() - {"grad_norm", "divergence"}
        assert found["before"].keys() == {f"evaluate/{name}" for name in names}
        for name in names:
            check_close(name, found["before"][f"evaluate/{name}"], oracle[0][name], 1e-4, 1e-5)

    check_all(cells, check)
    check_all(cells, check_held_out)
    assert loss != "kto" or oracle[1]["divergence"] > 0.01, "it has an effect"
    assert oracle[1]["loss"] < oracle[0]["loss"]
