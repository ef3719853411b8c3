"""Fine-tuning and reward models under several layouts: every update is the one of plain transformers, however the batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.supervised_worker import CUTS, LAYOUTS, NUM_UPDATES
from tests.distributed.world import World

WAYS = [(layout, cut) for layout in LAYOUTS for cut in CUTS]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("supervised")
    return four_ranks.run("supervised_worker", directory)


@pytest.mark.parametrize(("layout", "cut"), WAYS)
def test_fine_tuning_is_the_oracles(findings: Any, layout: str, cut: str) -> None:
    found, oracle = findings["updates"][f"sft/{layout}/{cut}"], findings["oracle"]["sft"]["history"]
    assert len(found["history"]) == len(oracle) == NUM_UPDATES
    for mine, theirs in zip(found["history"], oracle, strict=True):
        assert mine["loss/sft"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["actor/perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-5)
        assert mine["actor/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert oracle[1]["loss"] < oracle[0]["loss"]


@pytest.mark.parametrize(("layout", "cut"), WAYS)
def test_a_reward_model_is_the_oracles(findings: Any, layout: str, cut: str) -> None:
    found, oracle = findings["updates"][f"reward_model/{layout}/{cut}"], findings["oracle"]["reward_model"]["history"]
    for mine, theirs in zip(found["history"], oracle, strict=True):
        assert mine["loss/reward_model"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["reward_model/accuracy"] == pytest.approx(theirs["accuracy"])
        assert mine["reward_model/margin"] == pytest.approx(theirs["margin"], rel=1e-4, abs=1e-5)
        assert mine["reward_model/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert oracle[1]["loss"] < oracle[0]["loss"]


@pytest.mark.parametrize(("layout", "cut"), WAYS)
def test_held_out_figures_are_the_oracles(findings: Any, layout: str, cut: str) -> None:
    found, oracle = findings["updates"], {name: one["history"][0] for name, one in findings["oracle"].items()}
    assert found[f"sft/{layout}/{cut}"]["before"] == {
        "evaluate/loss": pytest.approx(oracle["sft"]["loss"], rel=1e-5),
        "evaluate/perplexity": pytest.approx(oracle["sft"]["perplexity"], rel=1e-5),
    }
    assert found[f"reward_model/{layout}/{cut}"]["before"] == {
        "evaluate/loss": pytest.approx(oracle["reward_model"]["plain_loss"], rel=1e-5),
        "evaluate/accuracy": pytest.approx(oracle["reward_model"]["accuracy"]),
        "evaluate/margin": pytest.approx(oracle["reward_model"]["margin"], rel=1e-4, abs=1e-5),
    }
