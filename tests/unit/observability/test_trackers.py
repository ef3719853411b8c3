from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rlhf_mcore.observability.files import FullDiskError
from rlhf_mcore.observability.trackers import JsonlTracker, MultiTracker, TensorboardTracker


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
    with pytest.raises(
        FullDiskError, match=r"No space left on device: .*metrics\.jsonl needs 12 bytes, [\d,]+ bytes are free"
    ):
        tracker.log(7, {})
    monkeypatch.undo()
    tracker.close()


def scalars(directory: Path) -> list[tuple[int, float]]:
    """(step, value) of every scalar in every file, as a reader finds them that knows nothing of restarts."""
    found = []
    for path in sorted(directory.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, value.tensor.float_val[0]) for value in event.summary.value]
    return sorted(found)


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    for last_step, steps in ((None, (1, 2, 3)), (2, (3, 4)), (0, ())):
        tracker = TensorboardTracker(tmp_path, last_step)
        for step in steps:
            tracker.log(step, {"reward/mean": step + (0.5 if last_step else 0.0)})
        tracker.close()
        if last_step == 2:
            assert scalars(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]
    assert scalars(tmp_path) == []  # the run went back to its beginning


def test_tensorboard_events_that_a_crash_cut_short_are_dropped(tmp_path: Path) -> None:
    tracker = TensorboardTracker(tmp_path)
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.close()
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-3])
    TensorboardTracker(tmp_path, 9).close()
    assert scalars(tmp_path) == [(1, 1.0)]


def test_tensorboard_gets_finite_numbers_under_their_names(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorboardTracker(tmp_path)
    tracker.log(3, {"reward/mean": torch.tensor(0.25), "loss/kl": float("inf"), "name": "x", "rollout/n": 4})
    tracker.log(4, {"reward/mean": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["reward/mean", "rollout/n"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.25), (4, 0.5)]


def test_several_trackers_are_all_told_and_all_closed() -> None:
    trackers = [FakeTracker(), FakeTracker(fails=True), FakeTracker()]
    multi = MultiTracker(trackers)
    multi.log(1, {"a": 1})
    with pytest.raises(OSError, match="cannot close"):
        multi.close()
    assert [tracker.events for tracker in trackers] == [[(1, {"a": 1}), "closed"]] * 3
