"""Test the checks before a model is built, and the number of ranks per machine for the bridge. tests/e2e trains."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import generation, trainers
from rlhf_mcore.cli.run_context import RunContext
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config, RewardConfig
from rlhf_mcore.observability.throughput import Timers
from rlhf_mcore.platform import current_platform
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.run_state import Start
from tests.unit.parallel.world import world

__all__ = ["world"]


@pytest.mark.usefixtures("world")
def test_a_bad_reward_function_is_found_before_data_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*given: Any, **more: Any) -> Any:
        raise AssertionError("a model was built, or data read")

    for name in ("ModelBuilder", "load_prompt_data"):
        monkeypatch.setattr(trainers, name, built)
    (tmp_path / "mine.py").write_text("def grade(text):\n    return 1.0\n")
    cfg = resolve(Config(reward=RewardConfig(function=f"{tmp_path / 'mine.py'}:grade")))
    requests: Any = None
    run = RunContext(cfg, current_platform(), RunRecord(Timers(), 0), Start(), requests, ExitStack())
    with pytest.raises(ConfigError, match=r"reward\.function is .*mine\.py:grade.* its parameters are \(text\)"):
        trainers.rl_trainer(run)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0, 0, 0, 0], None),  # a single machine
        ([0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 0, 0, 1], [0, 0, 0, 1]),
    ],
)
def test_machines_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], expected: list[int] | None
) -> None:
    monkeypatch.setenv("GROUP_RANK", str(numbers[0]))
    monkeypatch.setattr(generation, "all_gather_json", lambda mine: numbers if mine == 0 else [])
    assert generation.find_machines() == expected


def test_without_torchrun_there_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    monkeypatch.setattr(generation, "all_gather_json", lambda mine: [mine] * 4)
    assert generation.find_machines() is None
