"""Train actor and critic with separate layouts, on shared or separate ranks, and compare the losses with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_close
from tests.distributed.roles_worker import NUM_STEPS, SETUPS
from tests.distributed.setting import NOISE
from tests.distributed.world import World

# Noise of values and scores. Like logprobs, but the norm of a head row is 0.3 · sqrt(64) instead of about 1.
VALUE_NOISE = 0.3 * 8 * NOISE


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("roles")
    return four_ranks.run("roles_worker", directory)


def test_curves_are_those_of_one_process(findings: Any) -> None:
    alone = findings["runs"]["one_process"]

    def check(setup: str) -> None:
        found = findings["runs"][setup]
        assert len(found) == NUM_STEPS
        for number, (step, expected) in enumerate(zip(found, alone, strict=True)):
            for name in ("loss/total", "loss/policy", "loss/kl", "loss/value", "actor/grad_norm", "critic/grad_norm"):
                check_close(f"step {number}: {name}", step[name], expected[name], 2e-4, NOISE)
            for name in ("critic/explained_variance", "critic/values", "actor/entropy"):
                check_close(f"step {number}: {name}", step[name], expected[name], abs_=2e-4)

    check_all([name for name in SETUPS if name != "one_process"], check)


def test_the_critic_learns_the_returns(findings: Any) -> None:
    run = findings["runs"]["one_process"]
    assert run[0]["critic/explained_variance"] == 0.0, "a fresh head says zero everywhere"
    assert run[-1]["loss/value"] < run[0]["loss/value"]
    assert run[-1]["critic/explained_variance"] > run[1]["critic/explained_variance"]


def test_values_are_those_of_token_classification(findings: Any) -> None:
    oracle = findings["oracle"]["values"]

    def check(found: Any) -> None:
        for mine, theirs in zip(found["before"], oracle["before"], strict=True):
            assert mine == pytest.approx(theirs, abs=VALUE_NOISE)
        assert found["last"] == pytest.approx(oracle["last"], abs=VALUE_NOISE)
        assert found["weights"] == "", "a saved critic is the model that it was loaded from"
        # transformers maps a file into memory. Tensors of another file may have another alignment, and therefore another kernel.
        for saved, theirs in zip(
            [*found["saved"]["before"], found["saved"]["last"]], [*oracle["before"], oracle["last"]], strict=True
        ):
            assert saved == pytest.approx(theirs, abs=VALUE_NOISE)

    check_all(findings["values"], check)


def test_scores_are_those_of_sequence_classification(findings: Any) -> None:
    def check(found: Any) -> None:
        assert found == pytest.approx(findings["oracle"]["scores"], abs=VALUE_NOISE)

    check_all(findings["scores"], check)


def test_a_reference_in_host_memory_takes_over_the_actor(findings: Any) -> None:
    def check(found: Any) -> None:
        assert found["before"] > 1e-3 and found["after"] < NOISE
        assert found["held_between_uses"] == 0

    check_all(findings["refresh"], check)


def test_a_reference_by_layer_computes_the_same_and_holds_two_layers(findings: Any) -> None:
    def check(setup: str) -> None:
        _, _, pp, vpp, *_ = SETUPS[setup][0]
        assert all(findings["by_layer"][setup]["equal"])
        ranks = [held for held in findings["by_layer"][setup]["held"] if held]
        assert len(ranks) == SETUPS[setup][0][0]
        for held in ranks:
            assert len(held["layers"]) == 4 / pp and len(set(held["layers"])) == 1 and held["left"] == 0
            together = min(2, len(held["layers"]) // (vpp or 1))  # one chunk
            assert held["peak"] == held["rest"] + together * held["layers"][0]

    check_all(list(SETUPS), check)
