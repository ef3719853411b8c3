"""Fine-tuning and reward models under several layouts: every update is the one of plain transformers, however the batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_close
from tests.distributed.supervised_worker import NUM_UPDATES
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("supervised")
    return four_ranks.run("supervised_worker", directory)


def updates_of(findings: Any, kind: str) -> tuple[dict[str, Any], Any]:
    """Return the cells of a kind of model, and the history of its oracle."""
    cells = {name: found for name, found in findings["updates"].items() if name.startswith(f"{kind}/")}
    return cells, findings["oracle"][kind]["history"]


def test_fine_tuning_is_the_oracles(findings: Any) -> None:
    cells, oracle = updates_of(findings, "sft")

    def check(found: Any) -> None:
        assert len(found["history"]) == len(oracle) == NUM_UPDATES
        for mine, theirs in zip(found["history"], oracle, strict=True):
            check_close("loss/sft", mine["loss/sft"], theirs["loss"], rel=1e-5)
            check_close("actor/perplexity", mine["actor/perplexity"], theirs["perplexity"], rel=1e-5)
            check_close("actor/grad_norm", mine["actor/grad_norm"], theirs["grad_norm"], rel=1e-5)
        assert found["weights"] == ""

    check_all(cells, check)
    assert oracle[1]["loss"] < oracle[0]["loss"]


def test_a_reward_model_is_the_oracles(findings: Any) -> None:
    cells, oracle = updates_of(findings, "reward_model")

    def check(found: Any) -> None:
        for mine, theirs in zip(found["history"], oracle, strict=True):
            check_close("loss/reward_model", mine["loss/reward_model"], theirs["loss"], rel=1e-5)
            assert mine["reward_model/accuracy"] == pytest.approx(theirs["accuracy"])
            check_close("reward_model/margin", mine["reward_model/margin"], theirs["margin"], 1e-4, 1e-5)
            check_close("reward_model/grad_norm", mine["reward_model/grad_norm"], theirs["grad_norm"], rel=1e-5)
        assert found["weights"] == ""

    check_all(cells, check)
    assert oracle[1]["loss"] < oracle[0]["loss"]


def test_held_out_figures_of_fine_tuning_are_the_oracles(findings: Any) -> None:
    cells, (first, *_) = updates_of(findings, "sft")

    def check(found: Any) -> None:
        assert found["before"] == {
            "evaluate/loss": pytest.approx(first["loss"], rel=1e-5),
            "evaluate/perplexity": pytest.approx(first["perplexity"], rel=1e-5),
        }

    check_all(cells, check)


def test_held_out_figures_of_a_reward_model_are_the_oracles(findings: Any) -> None:
    cells, (first, *_) = updates_of(findings, "reward_model")

    def check(found: Any) -> None:
        assert found["before"] == {
            "evaluate/loss": pytest.approx(first["plain_loss"], rel=1e-5),
            "evaluate/accuracy": pytest.approx(first["accuracy"]),
            "evaluate/margin": pytest.approx(first["margin"], rel=1e-4, abs=1e-5),
        }

    check_all(cells, check)
