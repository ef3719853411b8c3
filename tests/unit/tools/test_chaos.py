"""Test the comparisons of the chaos driver. tests/e2e/test_default_run.py uses it on a killed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rlhf_mcore.checkpoint.layout import MANIFEST, ROLLOUTS
from tests.unit.checkpoint import saving
from tests.unit.checkpoint.saving import save
from tools.chaos import Run, differences, make_run, torment


def write_metrics(run: Path, *records: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    calm, chaos = tmp_path / "calm", tmp_path / "chaos"
    for run, seconds in ((calm, 1.0), (chaos, 2.0)):
        write_metrics(run, {"step": 0, "loss": 1.5}, {"step": 1, "loss": 0.1 + 0.2, "timing/step_s": seconds})
        save(run, 1)
    return calm, chaos


def test_times_may_differ_and_nothing_else(runs: tuple[Path, Path]) -> None:
    calm, chaos = runs
    assert differences(calm, chaos) == []
    write_metrics(chaos, {"step": 0, "loss": 1.5}, {"step": 1, "loss": 0.3, "reward": 1})
    assert differences(calm, chaos) == [
        "step 1: loss is 0.30000000000000004 against 0.3",
        "step 1: reward is None against 1",
    ]
    write_metrics(chaos, {"step": 1, "loss": 1.5})
    assert differences(calm, chaos) == ["metrics of steps [0, 1] against [1]"]


def test_a_file_that_differs_and_a_damaged_one_are_named(runs: tuple[Path, Path]) -> None:
    calm, chaos = runs
    save(chaos, 1, "second")
    assert differences(calm, chaos) == [
        "checkpoint-1 against checkpoint-1: actor/model.safetensors differs",
        "checkpoint-1 against checkpoint-1: actor/training/moments.safetensors differs",
    ]
    (calm / "checkpoint-1" / "actor" / "config.json").write_text("")
    assert any("actor/config.json: truncated" in line for line in differences(calm, chaos))


@pytest.mark.parametrize(
    ("seconds", "text", "token", "equal"),
    [(2.0, "a", 1, True), (1.0, "b", 1, False), (1.0, "a", 2, False)],
    ids=["times", "text", "tokens"],
)
def test_waiting_responses_are_compared_without_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, text: str, token: int, equal: bool
) -> None:
    calm, chaos = tmp_path / "calm", tmp_path / "chaos"
    for run, *values in ((calm, 1.0, "a", 1), (chaos, seconds, text, token)):
        records = json.dumps([{"text": values[1], "record": {"seconds": values[0]}}])
        waiting = safetensors.numpy.save({"tokens": np.array([values[2]])}, {"records": records})
        monkeypatch.setattr(saving, "contents", lambda step, version, waiting=waiting: {ROLLOUTS: waiting})
        write_metrics(run, {"step": 1})
        save(run, 1)
    wanted = [] if equal else ["checkpoint-1 against checkpoint-1: rollouts.safetensors differs"]
    assert differences(calm, chaos) == wanted


def test_both_runs_begin_in_directories_of_their_own(workspace: Any) -> None:
    run = make_run("run.yaml", ["experiment=x"], "chaos")
    assert run.directory == Path("outputs/rlhf_mcore/x-chaos")
    assert run.command[-2:] == ["experiment=x", "experiment=x-chaos"]
    run.directory.mkdir(parents=True)
    with pytest.raises(SystemExit, match="exists; remove it"):
        make_run("run.yaml", ["experiment=x"], "chaos")


def test_a_run_is_killed_at_every_instant_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def kill(run: Run, seconds: float, after_save: bool) -> bool:
        waited.append(seconds)
        return len(waited) < 3

    monkeypatch.setattr(Run, "is_killed_after", kill)
    assert torment(Run([], tmp_path), [5.0, 1.0, 2.0, 3.0], [False] * 4) == 2
    assert waited == [5.0, 1.0, 2.0]


def test_a_kill_after_a_save_waits_for_one(tmp_path: Path) -> None:
    """A stand-in saves a checkpoint every fifth of a second."""
    save = (
        "import pathlib, sys, time\n"
        "for n in range(500):\n"
        "    time.sleep(0.2)\n"
        "    folder = pathlib.Path(sys.argv[1], f'checkpoint-{n}')\n"
        "    folder.mkdir(exist_ok=True)\n"
        "    (folder / sys.argv[2]).touch()\n"
    )
    run = Run([sys.executable, "-c", save, str(tmp_path), MANIFEST], tmp_path)
    assert run.last_step() == -1
    assert run.is_killed_after(0.0, after_save=True)
    assert run.last_step() >= 0
