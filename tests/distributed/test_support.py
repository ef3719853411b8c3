"""What top-k and top-p have left is what ratios and gradients are of, on every layout: that of transformers' warpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.support_worker import CUTS, LAYOUTS
from tests.distributed.world import World

CASES = [(layout, cut) for layout in LAYOUTS for cut in CUTS]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("support")
    return four_ranks.run("support_worker", directory)


@pytest.mark.parametrize(("layout", "cut"), CASES)
def test_logprobs_are_those_within_the_supports(findings: Any, layout: str, cut: str) -> None:
    """In double precision; of a pass of their own and of the update's forward pass."""
    found, sizes = findings[f"{layout}/{cut}"], findings["sizes"]
    assert sizes[0] == 0 and len(sizes) > 4 and sizes[-1] <= 31
    assert 0 < found["own"] < 1e-5
    assert 0 < found["of_update"] < 1e-5


@pytest.mark.parametrize(("layout", "cut"), CASES)
def test_loss_gradient_and_new_weights_are_the_oracles(findings: Any, layout: str, cut: str) -> None:
    found, oracle = findings[f"{layout}/{cut}"], findings["oracle"]
    assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert found["losses"] == [found["loss/total"]] * 4
