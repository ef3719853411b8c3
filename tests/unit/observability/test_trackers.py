from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import TRACKERS, find_trackers
from rlhf_mcore.config.rules.run import tracker_problems
from rlhf_mcore.config.schema import Config, LoggingConfig
from rlhf_mcore.config.schema.run import wanted_trackers
from rlhf_mcore.observability import trackers
from rlhf_mcore.observability.files import FullDiskError
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.services.tensorboard import TensorboardTracker
from rlhf_mcore.observability.trackers import (
    BackgroundTracker,
    JsonlTracker,
    MultiTracker,
    TrackedRun,
    build_trackers,
)
from tests.messages import expect_error


class FakeTracker:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.events: list[object] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.events.append((step, dict(metrics)))

    def close(self) -> None:
        self.events.append("closed")
        if self.fails:
            raise OSError("cannot close")


def test_jsonl_has_one_object_per_step_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        tracker = JsonlTracker(path)
        tracker.log(step, {"reward/mean": torch.tensor(0.5), "actor/grad_norm": float("nan"), "note": "a"})
        tracker.close()
        tracker.close()
    line = '{{"step": {}, "reward/mean": 0.5, "actor/grad_norm": null, "note": "a"}}\n'
    assert path.read_text() == line.format(1) + line.format(2)


@pytest.mark.parametrize("whole", ["", '{"step": 1}\n', '{"step": 1}\n' + "x" * 70_000 + "\n"])
@pytest.mark.parametrize("torn", ["", '{"st', "y" * 70_000])
def test_a_line_that_a_crash_cut_short_is_removed(whole: str, torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + torn)
    tracker = JsonlTracker(path)
    tracker.log(2, {})
    tracker.close()
    assert path.read_text() == whole + '{"step": 2}\n'


def test_a_line_is_written_at_once_or_the_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data) - 3)
    with expect_error(FullDiskError, field="metrics.jsonl", value="12 bytes"):
        tracker.log(7, {})
    monkeypatch.undo()
    tracker.close()


def scalars(directory: Path) -> list[tuple[int, float]]:
    """Return (step, value) of every scalar in every file, like a reader that ignores restarts."""
    found = []
    for path in sorted(directory.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, value.tensor.float_val[0]) for value in event.summary.value]
    return sorted(found)


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    for last_step, steps in ((None, (1, 2, 3)), (2, (3, 4)), (0, ())):
        tracker = TensorboardTracker(TrackedRun(tmp_path, last_step))
        for step in steps:
            tracker.log(step, {"reward/mean": step + (0.5 if last_step else 0.0)})
        tracker.close()
        if last_step == 2:
            assert scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]
    assert scalars(tmp_path) == []  # the run restarted from its beginning


def test_tensorboard_events_that_a_crash_cut_short_are_dropped(tmp_path: Path) -> None:
    tracker = TensorboardTracker(TrackedRun(tmp_path))
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.close()
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-3])
    TensorboardTracker(TrackedRun(tmp_path, 9)).close()
    assert scalars(tmp_path) == [(1, 1.0)]


def test_a_tracker_in_its_thread_gets_finite_numbers_under_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    tracker = BackgroundTracker("tensorboard", TrackedRun(tmp_path / "tensorboard"), warnings.append)
    tracker.log(3, {"reward/mean": torch.tensor(0.25), "loss/kl": float("inf"), "name": "x", "rollout/n": 4})
    tracker.log(4, {"reward/mean": 0.5})
    tracker.close()
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean", "rollout/n"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.25), (4, 0.5)]
    assert not warnings


class Misbehaving:
    """A tracker that fails in the method named by ``fails_in``. ``released`` ends a hang."""

    fails_in = ""
    released = Event()

    def __init__(self, run: TrackedRun) -> None:
        self._in("init")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._in("log")

    def close(self) -> None:
        self._in("close")

    def _in(self, place: str) -> None:
        if self.fails_in == place:
            raise ConnectionError("the server\nis away")
        if self.fails_in == f"exit in {place}":
            sys.exit(3)
        if self.fails_in == f"hang in {place}":
            self.released.wait(60)


@pytest.mark.parametrize(
    ("fails_in", "why"),
    [
        ("init", "ConnectionError: the server"),
        ("log", "ConnectionError: the server"),
        ("close", "ConnectionError: the server"),
        ("exit in log", "SystemExit: 3"),
        ("hang in init", "it has not answered for 0 s"),
        ("hang in log", "it has not answered for 0 s"),
        ("hang in close", "it has not finished within 0 s"),
        ("import", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_whatever_a_tracker_does_is_one_warning(
    fails_in: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "no_such_package:Tracker" if fails_in == "import" else f"{__name__}:Misbehaving"
    monkeypatch.setattr(trackers, "find_trackers", lambda: {"bad": EntryPoint("bad", path, "any")})
    monkeypatch.setattr(Misbehaving, "fails_in", fails_in)
    monkeypatch.setattr(Misbehaving, "released", Event())
    warnings: list[str] = []
    tracker = BackgroundTracker("bad", TrackedRun(tmp_path), warnings.append, hangs_s=0.05, close_s=0.2)
    for step in range(4):
        tracker.log(step, {"reward/mean": 1.0})
        time.sleep(0.03)
    tracker.close()
    Misbehaving.released.set()
    told = f"warning: the tracker bad gets no more metrics ({why}); the run continues, and metrics.jsonl has them all"
    assert warnings == [told]


def test_a_run_keeps_its_id_until_it_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TrackedRun] = []
    monkeypatch.setattr(Misbehaving, "__init__", lambda self, run: made.append(run))
    noting = EntryPoint("tensorboard", f"{__name__}:Misbehaving", "any")
    monkeypatch.setattr(trackers, "find_trackers", lambda: {"tensorboard": noting})
    cfg, run = (
        Config(project="p", experiment="e", output_dir=str(tmp_path)),
        RunDirectory.create(str(tmp_path), "p", "e"),
    )
    cfg.reward.remote.url = "https://user:word@host/score"
    for last_step in (None, 7):
        build_trackers(cfg, run, last_step, print).close()
    run.set_aside_metrics()
    build_trackers(cfg, run, None, print).close()
    run.close()
    first, resumed, anew = made
    assert first.id == resumed.id != anew.id and (first.last_step, resumed.last_step) == (None, 7)
    assert (first.project, first.experiment, first.directory) == ("p", "e", tmp_path / "p" / "e" / "tensorboard")
    assert first.config["trainer.num_steps"] == cfg.trainer.num_steps and "word" not in str(first.config)


def test_trackers_are_known_and_their_packages_are_installed_before_anything_starts() -> None:
    logging = LoggingConfig(trackers=["tensorboard", "wandbb", "swanlab"])
    assert list(tracker_problems(logging)) == [
        "logging.trackers contains 'wandbb', which is not a tracker; did you mean wandb?",
        "logging.trackers contains 'swanlab', whose package swanlab is not installed; pip install 'rlhf_mcore[swanlab]', "
        "or remove it from logging.trackers",
    ]
    assert wanted_trackers(LoggingConfig(trackers=["wandb", "tensorboard", "wandb"])) == ["wandb", "tensorboard"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_the_core_names_the_class_of_its_trackers(name: str) -> None:
    pytest.importorskip(TRACKERS[name])
    assert {"log", "close"} <= vars(find_trackers()[name].load()).keys()


def test_a_tracker_whose_plug_in_is_not_installed_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "find_plugins", lambda kind: {})
    (problem,) = tracker_problems(LoggingConfig(trackers=["comet"]))
    assert "logging.trackers contains 'comet'" in problem and "rlhf_mcore_contrib.trackers" in problem


def test_several_trackers_are_all_told_and_all_closed() -> None:
    fakes = [FakeTracker(), FakeTracker(fails=True), FakeTracker()]
    multi = MultiTracker(fakes)
    multi.log(1, {"a": 1})
    with pytest.raises(OSError, match="cannot close"):
        multi.close()
    assert [fake.events for fake in fakes] == [[(1, {"a": 1}), "closed"]] * 3
