"""Save to full, read-only and slow disks. Real disks if a tmpfs may be mounted, and simulated failures."""

from __future__ import annotations

import errno
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.collective import CheckpointWriter, DiskFullError
from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import recover
from rlhf_mcore.checkpoint.layout import QUARANTINE, linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, verify
from rlhf_mcore.checkpoint.triggers import Triggers
from rlhf_mcore.config.schema import CheckpointConfig
from tests.messages import expect_error
from tests.small_disk import small_disk
from tests.unit.checkpoint.saving import FailingDisk

pytestmark = pytest.mark.usefixtures("world")

KIB = 1024


@pytest.fixture
def disk_of_one_mib(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, 1024) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        yield folder


def writes(kib: int) -> Callable[[Path], list[Path]]:
    """Return a function that writes one file of this size."""

    def write(partial: Path) -> list[Path]:
        path = partial / "actor" / "weights"
        path.parent.mkdir()
        path.write_bytes(bytes(kib * KIB))
        return [path]

    return write


def assert_only(run: Path, *steps: int) -> None:
    """Check that only these checkpoints exist, intact, without partial ones, and that ``latest`` names the last."""
    assert [item.step for item in scan(run)] == list(steps)
    assert all(verify(item.path) == [] for item in scan(run))
    assert scan_transitional(run) == [] and linked_step(run, "latest") == steps[-1]


def numbers(message: str, run: Path) -> tuple[int, int]:
    """Return the needed and free bytes in the sentence about disk space."""
    found = re.findall(re.escape(str(run)) + r" needs ([\d,]+) bytes for it, ([\d,]+) bytes are free\.", message)
    assert len(found) == 1 and "\n" not in message, message
    needed, free = (int(text.replace(",", "")) for text in found[0])
    return needed, free


def test_fault_09_a_save_that_does_not_fit_is_refused_before_anything_is_written(disk_of_one_mib: Path) -> None:
    writer, asked = CheckpointWriter(disk_of_one_mib), []
    writer.save(CheckpointInfo(10), writes(400), 400 * KIB)
    with pytest.raises(DiskFullError, match="No space left on device") as caught:
        writer.save(CheckpointInfo(20), lambda partial: asked.append(partial) or [], 700 * KIB)  # type: ignore[func-returns-value]
    needed, free = numbers(str(caught.value), disk_of_one_mib)
    assert needed == 700 * KIB and 560 * KIB < free <= 624 * KIB and asked == []
    assert str(caught.value).endswith("Earlier checkpoints are untouched.")
    assert_only(disk_of_one_mib, 10)


def test_fault_28_a_disk_that_fills_while_a_save_is_written(disk_of_one_mib: Path) -> None:
    """Another process fills the free space after the save has started."""
    writer = CheckpointWriter(disk_of_one_mib)
    writer.save(CheckpointInfo(10), writes(100), 100 * KIB)
    other = disk_of_one_mib / "other"

    def write(partial: Path) -> list[Path]:
        other.write_bytes(bytes(700 * KIB))
        return writes(500)(partial)

    with expect_error(DiskFullError, field=("checkpoint-20", "rank 0"), value="[Errno 28]") as caught:
        writer.save(CheckpointInfo(20), write, 500 * KIB)
    needed, free = numbers(str(caught.value), disk_of_one_mib)
    assert needed == 500 * KIB and 150 * KIB < free <= 224 * KIB  # the space of the failed save is free again
    assert_only(disk_of_one_mib, 10)
    other.unlink()
    writer.save(CheckpointInfo(20), writes(500), 500 * KIB)
    assert_only(disk_of_one_mib, 10, 20)


def test_fault_28_what_failed_saves_have_left_makes_room_for_the_next(disk_of_one_mib: Path) -> None:
    writer = CheckpointWriter(disk_of_one_mib)
    writer.save(CheckpointInfo(10), writes(100), 100 * KIB)
    for path in (".checkpoint-15.partial-0a1b", f"{QUARANTINE}/checkpoint-14.partial-0a1b-20260101T000000"):
        (disk_of_one_mib / path).mkdir(parents=True)
        (disk_of_one_mib / path / "weights").write_bytes(bytes(300 * KIB))
    kept = disk_of_one_mib / QUARANTINE / "checkpoint-12-20260101T000000"  # a complete checkpoint that was moved aside
    kept.mkdir()
    writer.save(CheckpointInfo(20), writes(600), 600 * KIB)
    assert_only(disk_of_one_mib, 10, 20)
    assert list((disk_of_one_mib / QUARANTINE).iterdir()) == [kept]


def test_fault_28_a_run_that_starts_again_on_a_full_disk_frees_what_its_saves_have_left(disk_of_one_mib: Path) -> None:
    CheckpointWriter(disk_of_one_mib).save(CheckpointInfo(10), writes(100), 100 * KIB)
    for path in (".checkpoint-15.partial-0a1b", f"{QUARANTINE}/checkpoint-14.partial-0a1b-20260101T000000"):
        (disk_of_one_mib / path).mkdir(parents=True)
        (disk_of_one_mib / path / "weights").write_bytes(bytes(400 * KIB))
    with (disk_of_one_mib / "other").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(KIB))
    notes = recover(disk_of_one_mib, None, Disk())
    assert any("the disk is full" in note and "2 unfinished saves" in note for note in notes)
    assert_only(disk_of_one_mib, 10)
    free = Disk().free_bytes(disk_of_one_mib)
    assert free is not None and free >= 800 * KIB


def test_fault_28_a_quota_is_named_as_such(tmp_path: Path) -> None:
    disk = FailingDisk(errno.EDQUOT, lambda name, path: name == "fsync" and path.name == "weights")
    with pytest.raises(DiskFullError, match="quota exceeded") as caught:
        CheckpointWriter(tmp_path, disk).save(CheckpointInfo(20), writes(4), 4 * KIB)
    assert numbers(str(caught.value), tmp_path)[0] == 4 * KIB


def test_a_file_system_that_tells_no_sizes_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "free_bytes", lambda self, directory: None)
    CheckpointWriter(tmp_path).save(CheckpointInfo(10), writes(4), 2**60)
    assert_only(tmp_path, 10)


def test_fault_12_storage_that_has_become_read_only(disk_of_one_mib: Path) -> None:
    writer = CheckpointWriter(disk_of_one_mib)
    writer.save(CheckpointInfo(10), writes(4), 4 * KIB)
    remount = ["mount", "-o", "remount,ro", str(disk_of_one_mib)]
    subprocess.run(remount, check=True, capture_output=True)
    with expect_error(SaveError, field=("checkpoint-20", "rank 0"), value="[Errno 30]"):
        writer.save(CheckpointInfo(20), writes(4), 4 * KIB)
    assert_only(disk_of_one_mib, 10)


def test_fault_12_slow_storage_ends_a_run_before_its_time_limit(tmp_path: Path) -> None:
    """Every change to the disk takes 20 s. The triggers measure the time of a save, and the last save still fits."""
    now = [0.0]

    class Slow(Disk):
        def perform(self, name, action, path):  # type: ignore[no-untyped-def]
            now[0] += 20
            return super().perform(name, action, path)

    writer, limit = CheckpointWriter(tmp_path, Slow()), 3000.0
    triggers = Triggers(CheckpointConfig(save_steps=1), 100, tmp_path, limit, lambda: now[0])
    triggers.begin()
    for step in range(1, 100):
        now[0] += 10
        decision = triggers.decide(step, {})
        began = now[0]
        writer.save(CheckpointInfo(step), writes(1), KIB)
        triggers.record_save(step, now[0] - began)
        if decision.stop:
            break
    assert decision.stop and step > 1
    assert limit / 2 < now[0] <= limit
    assert linked_step(tmp_path, "latest") == step
