"""Further families say, keep and learn on four ranks what they do in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.family_worker import FEW, SHARED, layouts_of
from tests.distributed.setting import NOISE
from tests.distributed.world import World, run_world

CASES = [(model, layout) for model in FEW for layout in FEW[model]]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return four_ranks.run("family_worker", tmp_path_factory.mktemp("families"))


def check_weights(found: Any) -> None:
    for logprobs, entropy in found["parity"].values():
        assert logprobs < NOISE
        assert entropy < 1e-4
    assert found["gather"] == ""
    for held, predicted in found["names"]:
        assert held == predicted


def check_update(found: Any, oracle: Any) -> None:
    assert found["saved"] == ""
    # A bucket and a part that an earlier one began: of gpt-oss a part is an expert of 65,536 bytes, of which a tensor has four.
    assert found["assembled"] < 80_000 + 65_536
    assert found["update"]["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["update"]["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["update"]["weights"] == ""


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logprobs_are_those_of_transformers_and_weights_make_the_way_back(
    findings: Any, model: str, layout: str
) -> None:
    check_weights(findings[f"{model}/{layout}"])


@pytest.mark.parametrize("model", FEW)
def test_a_saved_directory_is_the_one_it_came_from_and_an_update_that_of_transformers(
    findings: Any, model: str
) -> None:
    check_update(findings[f"{model}/{FEW[model][0]}"], findings["oracle"][model])


@pytest.mark.parametrize("model", SHARED)
def test_no_metric_depends_on_how_ranks_share_a_sequence(findings: Any, model: str) -> None:
    """Under context parallelism a rank has some heads of gated delta nets, whose states pass through all tokens."""
    whole, *others = [findings[f"{model}/{layout}"]["update"] for layout in FEW[model]]
    for found in others:
        assert found["weights"] == "" and found.keys() == whole.keys() and len(found) >= 10
        for name in found.keys() - {"weights"}:
            assert found[name] == pytest.approx(whole[name], rel=NOISE, abs=NOISE), name


@pytest.mark.matrix
@pytest.mark.parametrize("model", FEW)
def test_every_layout(model: str, tmp_path: Path) -> None:
    findings = run_world("distributed.family_worker", 4, tmp_path, model)
    for layout in layouts_of(model):
        check_weights(findings[f"{model}/{layout}"])
        check_update(findings[f"{model}/{layout}"], findings["oracle"][model])
