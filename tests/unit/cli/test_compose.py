"""What a run ends with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import rich.console

from rlhf_mcore.cli.compose import OpenRun
from rlhf_mcore.config.schema import Config
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.timers import Timers
from rlhf_mcore.trainer.record import RunRecord


def test_a_number_that_was_not_finite_before_is_left_out_of_the_table(tmp_path: Path) -> None:
    """A run that is resumed reads null for it, and has trained to its end by then."""
    output = rich.console.Console(file=io.StringIO(), width=100)
    record = RunRecord(Timers(), 0)
    record.console, record.directory = (
        Console("plain", 2, "p / e", output=output),
        RunDirectory.create(str(tmp_path), "p", "e"),
    )
    before = {"step": 0, "evaluate/reward": None, "evaluate/accuracy": 0.25}
    record.recall([before, {"step": 2, "reward/mean": 0.5, "evaluate/reward": 0.5, "evaluate/accuracy": 0.75}])
    OpenRun(Config(), record, None, 3).finish()
    record.directory.close()
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out accuracy" in printed and "+0.500" in printed and "held-out reward" not in printed


@pytest.mark.parametrize(
    ("shares", "teacher", "is_hinted"),
    [((1.0, 1.0), None, True), ((1.0, 0.75), None, False), ((1.0, 1.0), "models/teacher", False)],
)
def test_a_run_whose_rewards_were_all_zero_says_what_to_do(
    tmp_path: Path, shares: tuple[float, ...], teacher: str | None, is_hinted: bool
) -> None:
    """Not if it has a teacher: a distillation has no other reward than 0, and learns."""
    output = rich.console.Console(file=io.StringIO(), width=300)
    record = RunRecord(Timers(), 0)
    record.console = Console("plain", 2, "p / e", output=output)
    record.directory = RunDirectory.create(str(tmp_path), "p", "e")
    record.recall(
        [{"step": step, "reward/mean": 0.0, "reward/share_zero": share} for step, share in enumerate(shares, 1)]
    )
    cfg = Config()
    cfg.teacher.path = teacher
    OpenRun(cfg, record, None, 3).finish()
    record.directory.close()
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "every reward was 0, so nothing was learned" in printed and "rlhf-mcore reward-test" in printed
    ) is is_hinted
