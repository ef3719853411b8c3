"""Compare distillation updates under every kind of layout with dense divergences in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.distillation_worker import COEF, LAYOUTS, ways
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("distillation")
    return four_ranks.run("distillation_worker", directory)


@pytest.mark.parametrize(("layout", "divergence"), ways())
def test_loss_gradient_and_new_weights_are_the_oracles(findings: Any, layout: str, divergence: str) -> None:
    found, oracle = findings[f"{layout}/{divergence}"], findings[f"oracle/{divergence}"]
    assert oracle["extra"] > 0.01
    assert found["teacher/divergence"] == pytest.approx(oracle["extra"] / COEF, rel=1e-5)
    assert found["loss/total"] == pytest.approx(oracle["loss"] + oracle["extra"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""


def test_tokens_that_are_put_together_differ_less(findings: Any) -> None:
    for name in ("forward", "reverse"):
        assert 0 < findings[f"oracle/{name}_top"]["extra"] < findings[f"oracle/{name}"]["extra"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_teachers_by_data_source_read_prompts_of_their_own(findings: Any, layout: str) -> None:
    assert 0 < findings[f"{layout}/others"] < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_average_follows_the_actor(findings: Any, layout: str) -> None:
    assert findings[f"{layout}/average"] == ""
