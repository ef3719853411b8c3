"""Compare further families on four ranks with transformers: logprobs, weights and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_close
from tests.distributed.family_worker import FEW, SHARED
from tests.distributed.setting import NOISE
from tests.distributed.test_parity import check_parity, check_weights
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("families")
    return four_ranks.run("family_worker", directory)


@pytest.mark.parametrize("model", FEW)
def test_logprobs_are_those_of_transformers_and_weights_make_the_way_back(findings: Any, model: str) -> None:
    cells = {layout: findings[f"{model}/{layout}"] for layout in FEW[model]}
    check_all(cells, check_parity)
    check_all(cells, check_weights)


@pytest.mark.parametrize("model", FEW)
def test_a_saved_directory_is_the_one_it_came_from(findings: Any, model: str) -> None:
    found = findings[f"{model}/{FEW[model][0]}"]
    assert found["saved"] == ""
    # A bucket, and a part that an earlier bucket began. A part of gpt-oss is an expert of 65,536 bytes, and a tensor
    # contains four.
    assert found["assembled"] < 80_000 + 65_536


@pytest.mark.parametrize("model", FEW)
def test_an_update_is_that_of_transformers(findings: Any, model: str) -> None:
    found, oracle = findings[f"{model}/{FEW[model][0]}"]["update"], findings["oracle"][model]
    check_close("loss/total", found["loss/total"], oracle["loss"], rel=1e-5)
    check_close("actor/grad_norm", found["actor/grad_norm"], oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""


@pytest.mark.parametrize("model", sorted(FEW.keys() & set(SHARED)))
def test_no_metric_depends_on_how_ranks_share_a_sequence(findings: Any, model: str) -> None:
    """Under context parallelism a rank computes some heads of the gated delta nets. Their states pass through all tokens."""
    whole, *others = [
        {
            name: value
            for name, value in findings[f"{model}/{layout}"]["update"].items()
            if name != "trainer/computed_share"
        }
        for layout in FEW[model]
    ]

    def check(found: Any) -> None:
        assert found["weights"] == "" and found.keys() == whole.keys() and len(found) >= 10
        for name in found.keys() - {"weights", "losses"}:
            check_close(name, found[name], whole[name], NOISE, NOISE)
        assert found["losses"] == pytest.approx(whole["losses"], rel=NOISE, abs=NOISE)

    check_all(dict(zip(FEW[model][1:], others, strict=True)), check)
