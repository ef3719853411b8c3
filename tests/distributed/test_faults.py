"""Faults of Megatron-core that nothing here meets: what it computes where they are. The table is in docs/compatibility.md."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("faults")
    return four_ranks.run("faults_worker", directory)


def test_smoothed_labels_are_averaged_over_a_rank_s_part_of_the_vocabulary(findings: Any) -> None:
    """Finding 1. Without smoothing the loss is right, with it the two ranks of a group disagree."""
    assert findings["sharded"] == pytest.approx(findings["loss"], abs=1e-6)
    first, second = findings["smoothed"][:2]
    assert abs(first[0] - second[0]) > 0.05


def test_the_loss_of_gathered_logits_counts_each_rank_s_copy(findings: Any) -> None:
    """Finding 2: the sum of exponentials is taken tp times."""
    assert findings["gathered"] == pytest.approx([loss + log(2) for loss in findings["loss"]], abs=1e-6)


def test_the_count_of_a_rank_s_valid_tokens_becomes_that_of_all(findings: Any) -> None:
    """Finding 10: the ranks of a group have three and one."""
    assert findings["counts"][:2] == [[4.0, 4.0], [4.0, 4.0]]


def test_sinks_are_in_the_norm_of_the_gradient(findings: Any) -> None:
    """Finding 8 does not apply: each rank's part of the sinks is marked as its own. The norm itself is held by test_families.py."""
    assert findings["sinks"] == [[2, True]] * 4
