"""Two ranks resume from a checkpoint whose read takes longer than a rank waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.world import run_world


def test_each_rank_reads_its_part_of_a_checkpoint_in_time(tmp_path: Path) -> None:
    found = run_world("distributed.resume_worker", 2, tmp_path, timeout_s=120)
    assert found["first_step"] == 3
    assert found["parts"] == pytest.approx([0.5, 0.5], abs=0.2)  # the first rank also reads the run's model and data
