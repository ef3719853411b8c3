from __future__ import annotations

from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema.run import time_left
from rlhf_mcore.config.validate import validate


def check(*overrides: str) -> list[str]:
    """The problems of run.yaml with these overrides of ``checkpoint``."""
    try:
        validate(load_config("run.yaml", [f"checkpoint.{override}" for override in overrides]))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["metric_for_best_model=accuracy"], ["metric_for_best_model='accuracy'", "evaluate/accuracy"]),
        (["metric_for_best_model=evaluate/reward"], ["needs held-out prompts", "data.eval=[]", "name files"]),
        (
            ["archive=true", "save_total_limit=null"],
            ["archive=True", "save_total_limit=null", "set checkpoint.save_total_limit"],
        ),
        (["save_by=tomorrow"], ["save_by='tomorrow'", "minutes", "auto"]),
        (["save_by='-5'"], ["save_by='-5'"]),
        (["mode=0444"], ["mode='0444'", "private, 0600", "null"]),
        (["mode=640"], ["mode='640'", "0640"]),
    ],
)
def test_fault_07_what_cannot_work_is_refused_at_the_start(
    workspace: Any, overrides: list[str], words: list[str]
) -> None:
    problems = check(*overrides)
    assert any(all(word in problem for word in words) for problem in problems), problems


@pytest.mark.parametrize(("override", "name"), [("deltas=9", "deltas"), ("archive=true", "archive")])
def test_a_missing_plugin_is_named(workspace: Any, monkeypatch: pytest.MonkeyPatch, override: str, name: str) -> None:
    assert not any("rlhf_mcore_contrib" in problem for problem in check(override))
    monkeypatch.setattr("rlhf_mcore.plugins.entry_points", lambda group: [])
    (problem,) = (problem for problem in check(override) if "rlhf_mcore_contrib" in problem)
    assert problem.startswith(f"checkpoint.{override.partition('=')[0]}")
    assert f"needs rlhf_mcore_contrib.{name}" in problem and "pip install" in problem


def test_fault_07_every_combination_of_saving_is_accepted_or_refused_with_a_message(workspace: Any) -> None:
    """The keys that meet each other, all ways: refused only for the reasons above."""
    refused = 0
    for limit, archive, keep, deltas, background in product([None, 1], [False, True], [None, 2], [0, 9], [False, True]):
        problems = check(
            f"save_total_limit={'null' if limit is None else limit}",
            f"archive={archive}",
            f"keep_every={'null' if keep is None else keep}",
            f"deltas={deltas}",
            f"async_save={background}",
        )
        expected = limit is None and archive
        assert bool(problems) == expected
        assert all("set checkpoint.save_total_limit" in problem for problem in problems)
        refused += expected
    assert refused == 8


def test_modes_may_be_written_with_quotes_and_without(workspace: Any) -> None:
    for mode in ["private", "0600", "'0640'", "null"]:
        assert check(f"mode={mode}") == []


def test_a_checkpoint_may_be_named(workspace: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "manifest.json").write_text("{}")
    assert check(f"resume={tmp_path / 'checkpoint-3'}") == []


def test_the_time_limit() -> None:
    for save_by, environment, expected in [
        (None, {"SLURM_JOB_END_TIME": "1700000000"}, None),
        ("auto", {}, None),
        ("auto", {"SLURM_JOB_END_TIME": "1700000000"}, 1_700_000_000.0 - 1000),
        ("auto", {"SLURM_JOB_END_TIME": "unknown"}, None),
        ("90", {"SLURM_JOB_END_TIME": "1700000000"}, 90 * 60.0),
        ("0.5", {}, 30.0),
        ("2026-01-01T00:00+00:00", {}, datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp() - 1000),
        ("2026-01-01T00:00", {}, datetime(2026, 1, 1).timestamp() - 1000),  # the machine's time zone
    ]:
        assert time_left(save_by, 1000.0, environment) == expected
