"""Indexers learn on every layout what transformers' layers learn, and the rest of the model what it learns without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.indexer_worker import CASES
from tests.distributed.setting import NOISE
from tests.distributed.world import World

ALL = [(stage, layout) for stage, layouts in CASES.items() for layout in layouts]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("indexers")
    return four_ranks.run("indexer_worker", directory)


@pytest.mark.parametrize(("stage", "layout"), ALL)
def test_an_update_is_that_of_transformers_token_by_token(findings: Any, stage: str, layout: str) -> None:
    found, oracle = findings[f"{stage}/{layout}"], findings["oracle"][stage]
    assert found["actor/indexer_loss"] == pytest.approx(oracle["indexer_loss"], rel=1e-5)
    alone = "indexer_grad_norm" if stage == "sparse" else "grad_norm"
    assert found[f"actor/{alone}"] == pytest.approx(oracle["indexer_grad_norm"], rel=1e-4)
    if stage == "sparse":
        assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
        assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-4)
    assert found["weights"] == ""


def test_a_resumed_run_continues_with_the_same_indexers(findings: Any) -> None:
    found = findings["resumed"]
    assert found["moments"] == 20 and found["weights"] == ""
    assert found["found"] == pytest.approx(found["expected"], rel=NOISE)
