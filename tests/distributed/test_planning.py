"""Check that the planner's bytes are within 5 % of real Megatron models and checkpoints on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.planning_worker import CASES
from tests.distributed.world import World

KEYS = ["/".join(case) for case in CASES]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("planning")
    return four_ranks.run("planning_worker", directory)


@pytest.mark.parametrize("case", KEYS)
def test_bytes_of_every_rank_and_of_a_checkpoint(findings: Any, case: str) -> None:
    found = findings[case]
    held, predicted = found["state"]
    for kind in ("weights", "gradients"):
        assert [rank[kind] for rank in predicted] == pytest.approx([rank[kind] for rank in held], rel=0.05)
    for kind in ("masters", "moments", "hosted"):  # ranks of a tiny model cannot share it equally
        assert sum(rank[kind] for rank in predicted) == pytest.approx(sum(rank[kind] for rank in held), rel=0.05)
    assert all(rank["moments"] + rank["hosted"] > 0 for rank in held)
    held, predicted = found["frozen"]
    assert predicted == pytest.approx(held, rel=0.05)
    whole, (held, predicted) = predicted, found["by_layer"]
    for rank in range(4):  # chunks of a single layer have no adjacent layers
        assert 0.95 * held[rank] <= predicted[rank] <= whole[rank]
    written, predicted = found["checkpoint"]
    assert predicted == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize("case", KEYS)
def test_sizes_from_config_json_are_those_of_the_model(findings: Any, case: str) -> None:
    of_model, from_json = findings[case]["geometry"]
    assert from_json == of_model
