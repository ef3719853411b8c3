"""Write the record of a run to a real full disk. One error names the path, the needed and the free bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_mcore.commands.evaluate.results import PartFile
from rlhf_mcore.observability.files import FullDiskError, keep_steps
from rlhf_mcore.observability.run_directory import RunDirectory, write_rollouts
from rlhf_mcore.observability.services.tensorboard import TensorboardTracker
from rlhf_mcore.observability.trackers import JsonlTracker, TrackedRun
from tests.messages import expect_error
from tests.small_disk import small_disk

SIZE = 256 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, SIZE // 1024) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        yield folder


def until_it_is_full(write: Callable[[], object]) -> FullDiskError:
    with pytest.raises(FullDiskError) as caught:
        for _ in range(10_000):
            write()
    return caught.value


RECORD = {"text": "x" * 5000}


def test_fault_28_metrics(disk: Path) -> None:
    tracker = JsonlTracker(disk / "metrics.jsonl")
    error = until_it_is_full(lambda: tracker.log(3, RECORD))
    tracker.close()
    assert str(error) == (
        f"[Errno 28] No space left on device: {disk / 'metrics.jsonl'} needs 5,024 bytes, 0 bytes are free"
    )
    kept = keep_steps((disk / "metrics.jsonl").read_bytes(), 3)
    assert len(kept) % 5024 == 0 and SIZE - 5024 < len(kept) <= SIZE  # whole lines


def test_fault_28_a_rollout_file(disk: Path) -> None:
    names = iter(range(10_000))
    error = until_it_is_full(lambda: write_rollouts(disk / f"{next(names)}.jsonl", [RECORD] * 4))
    assert "jsonl needs 20,052 bytes" in str(error) and "bytes are free" in str(error)
    assert {path.stat().st_size for path in disk.iterdir()} == {20_052}  # the record that did not fit left no bytes


def test_fault_28_what_an_evaluation_has_scored(disk: Path) -> None:
    (disk / "parts").mkdir()
    part = PartFile(disk, 0, 1)
    error = until_it_is_full(lambda: part.append([RECORD | {"index": 0}]))
    part.close()
    assert "engine-00000-of-00001.jsonl needs" in str(error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # by tensorboard
def test_fault_28_tensorboard(disk: Path) -> None:
    tracker = TensorboardTracker(TrackedRun(disk / "tensorboard"))
    scalars = {f"metric {number}": 1.0 for number in range(200)}
    try:
        error = until_it_is_full(lambda: tracker.log(1, scalars))
    finally:
        for path in disk.rglob("events*"):
            path.unlink()
    assert f"{disk / 'tensorboard'} cannot be written" in str(error)


def test_fault_28_a_run_may_begin_on_a_full_disk(disk: Path) -> None:
    RunDirectory.create(str(disk), "p", "e").close()
    with (disk / "other").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0
    run = RunDirectory.create(str(disk), "p", "e")
    with expect_error(FullDiskError, field="config.yaml", value=(8, 0)):
        run.write_config("seed: 1\n")
    run.close()
