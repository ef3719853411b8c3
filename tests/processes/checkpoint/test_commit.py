"""Test the commit protocol under kills and failing storage. A separate process saves, and is killed at every boundary."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import BestRule, recover, set_aside, steps_after
from rlhf_mcore.checkpoint.layout import linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import DELTA, Base, CheckpointInfo, read_manifest, verify
from tests.messages import expect_error
from tests.unit.checkpoint.saving import FailingDisk, RecordingDisk, contents, read, save

pytestmark = pytest.mark.default
ROOT = Path(__file__).resolve().parents[3]
OLD = {"10": "first", "20": "first"}


def in_a_process_that_kills(module: str, *arguments: object) -> Any:
    """Run a module of this folder and return its findings.

    It uses memory as storage if the machine has /dev/shm, because the tests check order, not disks.
    """
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        command = [sys.executable, "-m", f"tests.processes.checkpoint.{module}", folder, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def walk_findings() -> dict[str, list[dict[str, Any]]]:
    """Return the findings after a kill at every boundary, by scenario."""
    return in_a_process_that_kills("walk")


def kills(walked: dict[str, list[dict[str, Any]]], scenario: str, at_least: int) -> list[dict[str, Any]]:
    found = walked[scenario]
    assert sum(item["killed"] for item in found) >= at_least
    assert sum(not item["killed"] for item in found) == 2  # each half finished the action
    return found


def test_fault_01_a_kill_at_any_boundary_leaves_the_previous_checkpoint_or_the_new_one(
    walk_findings: dict[str, list[dict[str, Any]]],
) -> None:
    for found in kills(walk_findings, "new", at_least=25):
        assert found["before"] in (OLD, OLD | {"30": "first"}), found
        assert found["link_before"] in (20, 30)
        assert found["after"] == found["before"], found
        assert found["link_after"] == max(int(step) for step in found["after"])
        assert (found["left"], found["again"]) == ([], [])
        assert found["later"] == "later"
    assert walk_findings["new"][-1]["after"] == OLD | {"30": "first"}


def test_fault_01_a_killed_first_save_leaves_nothing_or_a_checkpoint(
    walk_findings: dict[str, list[dict[str, Any]]],
) -> None:
    for found in kills(walk_findings, "first", at_least=25):
        assert found["after"] in ({}, {"10": "first"}), found
        assert found["link_after"] == (10 if found["after"] else None)
        assert (found["left"], found["later"]) == ([], "later")


def test_fault_03_saving_a_step_again_leaves_one_complete_copy(walk_findings: dict[str, list[dict[str, Any]]]) -> None:
    versions = set()
    for found in kills(walk_findings, "again", at_least=30):
        assert found["after"].keys() == OLD.keys(), found
        assert found["after"]["10"] == "first"
        assert found["link_after"] == 20 and found["left"] == []
        versions.add(found["after"]["20"])
    assert versions == {"first", "second"}
    assert walk_findings["again"][-1]["after"] == {"10": "first", "20": "second"}


def test_a_killed_recovery_is_finished_by_the_next(walk_findings: dict[str, list[dict[str, Any]]]) -> None:
    for found in kills(walk_findings, "recover", at_least=15):
        assert found["after"] == OLD, found
        assert (found["left"], found["again"], found["link_after"]) == ([], [], 20)


def test_a_killed_removal_leaves_no_half_checkpoint(walk_findings: dict[str, list[dict[str, Any]]]) -> None:
    for found in kills(walk_findings, "prune", at_least=8):
        assert found["before"] in (OLD, {"20": "first"}), found
        assert found["after"] == found["before"] and found["left"] == []


def test_fault_29_a_kill_inside_pruning_leaves_no_differences_without_their_full_checkpoint(
    walk_findings: dict[str, list[dict[str, Any]]],
) -> None:
    seen = set()
    for found in kills(walk_findings, "prune deltas", at_least=40):
        assert set(found["before"].values()) == {"first"}, found  # every listed checkpoint can be loaded
        assert found["after"] == found["before"] and (found["left"], found["link_after"]) == ([], 25)
        seen.add(tuple(found["before"]))
    assert seen >= {("20", "25"), ("10", "20", "22", "25"), ("25",)}


def test_fault_29_no_link_names_differences_whose_full_checkpoint_is_gone(tmp_path: Path) -> None:
    for step, accuracy in ((10, 0.1), (20, 0.2)):
        save(tmp_path, step, metrics={"evaluate/accuracy": accuracy})
    base = Base("checkpoint-20", read_manifest(tmp_path / "checkpoint-20").digest)
    save(tmp_path, 30, info=CheckpointInfo(30, DELTA, base, {"evaluate/accuracy": 0.3}))
    recover(tmp_path, BestRule("evaluate/accuracy"), Disk())
    assert (linked_step(tmp_path, "latest"), linked_step(tmp_path, "best")) == (30, 30)
    shutil.rmtree(tmp_path / "checkpoint-20")
    recover(tmp_path, None, Disk())
    assert (linked_step(tmp_path, "latest"), linked_step(tmp_path, "best")) == (10, None)


def test_fault_27_a_directory_of_runs_killed_at_random_loses_nothing_that_was_reported_as_saved() -> None:
    """Full and delta saves, retention and recovery are killed many times, without a cleanup in between."""
    kills = 40
    found = in_a_process_that_kills("soak", 1, kills)
    assert sum(item["killed"] for item in found) >= kills // 2
    for item in found:
        assert item["newest"] >= item["said"] and item["linked"] == (item["newest"] or None), item
        assert item["same"] and (item["problems"], item["left"]) == ([], []), item
        assert item["count"] <= 5, item  # two newest, their base, and files that a killed run has not yet removed
    assert found[-1]["newest"] > 2.5 * kills


def test_everything_is_durable_before_it_gets_its_name(tmp_path: Path) -> None:
    """Unlike a kill, a power cut loses data without fsync. Only the order of calls protects against it."""
    disk = RecordingDisk()
    save(tmp_path, 10, disk=disk)
    partial = tmp_path / ".checkpoint-10.partial-0a1b"
    synced: dict[Path, int] = {path: at for at, (name, path) in enumerate(disk.log) if name == "fsync"}
    manifest = disk.log.index(("write", partial / "manifest.json"))
    renamed = disk.log.index(("rename", partial))
    assert all(synced[partial / name] < manifest for name in contents(10))
    assert all(synced[partial / folder] < manifest for folder in ("actor", "actor/training"))
    assert manifest < synced[partial / "manifest.json"] < synced[partial] < renamed
    linked = disk.log.index(("rename", tmp_path / ".latest.new"))
    between = disk.log[renamed + 1 : linked]
    assert ("fsync", tmp_path) in between
    assert disk.log[-1] == ("fsync", tmp_path)


def test_fault_02_broken_or_missing_links_are_rebuilt_by_scanning(tmp_path: Path) -> None:
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.9), (40, float("nan"))):
        save(tmp_path, step, metrics={"evaluate/accuracy": accuracy})
    rule = BestRule("evaluate/accuracy")
    for break_them in ("missing", "dangling", "outside", "a file"):
        for name in ("latest", "best"):
            link = tmp_path / name
            link.unlink(missing_ok=True)
            if break_them == "dangling":
                link.symlink_to("checkpoint-99")
            elif break_them == "outside":
                link.symlink_to("../checkpoint-10")
            elif break_them == "a file":
                link.write_text("checkpoint-10")
        notes = recover(tmp_path, rule, Disk())
        assert notes == ["link latest now names checkpoint-40", "link best now names checkpoint-20"]
        assert (linked_step(tmp_path, "latest"), linked_step(tmp_path, "best")) == (40, 20)
    assert recover(tmp_path, rule, Disk()) == []
    recover(tmp_path, BestRule("evaluate/accuracy", greater_is_better=False), Disk())
    assert linked_step(tmp_path, "best") == 10


def test_fault_04_a_partial_directory_is_quarantined_and_the_link_has_not_moved(tmp_path: Path) -> None:
    save(tmp_path, 10)
    partial = prepare(tmp_path, 20, "77", Disk())
    (partial / "weights").write_bytes(b"half")
    assert linked_step(tmp_path, "latest") == 10
    (note,) = recover(tmp_path, None, Disk())
    assert note.startswith("unfinished .checkpoint-20.partial-77 moved to quarantine/checkpoint-20.partial-77-")
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert (kept / "weights").read_bytes() == b"half"
    assert [item.step for item in scan(tmp_path)] == [10]


def test_fault_05_a_leftover_of_the_same_step_does_not_get_into_the_new_save(tmp_path: Path) -> None:
    for token in ("1", "2", ""):
        left = prepare(tmp_path, 20, token, Disk())
        (left / "stale").write_bytes(b"stale")
    other = prepare(tmp_path, 30, "1", Disk())
    assert sorted(read(save(tmp_path, 20))) == sorted(contents(20))
    assert len(list((tmp_path / "quarantine").iterdir())) == 3
    assert [item.path for item in scan_transitional(tmp_path)] == [other]


def test_fault_09_a_full_disk_leaves_the_earlier_checkpoint_and_no_partial(tmp_path: Path) -> None:
    save(tmp_path, 10)
    disk = FailingDisk(errno.ENOSPC, lambda name, path: name == "write" and path.name == "manifest.json")
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 20, disk=disk)
    assert disk.pauses == []  # a retry does not free space
    disk.remove_tree(tmp_path / ".checkpoint-20.partial-0a1b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "latest"]
    assert verify(tmp_path / "checkpoint-10") == []


def test_fault_12_storage_that_fails_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    seen: set[tuple[str, str]] = set()

    def once_each(name: str, path: Path) -> bool:
        known = (name, path.name) in seen
        seen.add((name, path.name))
        return not known

    disk = FailingDisk(errno.EIO, once_each)
    partial = prepare(tmp_path, 10, "1", disk)
    seal(partial, {}, CheckpointInfo(10), disk)
    publish(tmp_path, 10, partial, disk)
    assert verify(tmp_path / "checkpoint-10") == [] and linked_step(tmp_path, "latest") == 10
    # mkdir; fsync of the directory; write and fsync of the manifest; rename; fsync of the run; symlink, rename and
    # unlink of the link
    assert disk.pauses == [0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("number, pauses", [(errno.EIO, [0.1, 0.5, 2.0]), (errno.EROFS, []), (errno.EACCES, [])])
def test_fault_12_storage_that_stays_broken_is_a_clear_error(number: int, pauses: list[float], tmp_path: Path) -> None:
    save(tmp_path, 10)
    disk = FailingDisk(number, lambda name, path: name == "rename" and path.name.startswith(".checkpoint"))
    with pytest.raises(OSError, match="checkpoint-20"):
        save(tmp_path, 20, disk=disk)
    assert disk.pauses == pauses
    assert linked_step(tmp_path, "latest") == 10


def test_fault_12_an_fsync_that_failed_is_not_believed_the_second_time(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w")
    failed: list[Path] = []

    def once(name: str, path: Path) -> bool:
        failed.append(path)
        return len(failed) == 1

    with pytest.raises(OSError, match="Input/output"):
        seal_files(tmp_path, ["weights"], FailingDisk(errno.EIO, once))


def test_a_rename_that_fails_brings_the_replaced_checkpoint_back(tmp_path: Path) -> None:
    save(tmp_path, 10)
    disk = FailingDisk(errno.ENOSPC, lambda name, path: name == "rename" and ".partial" in path.name)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 10, "second", disk=disk)
    assert read(tmp_path / "checkpoint-10") == contents(10)


def test_a_file_that_nobody_hashed_is_not_sealed(tmp_path: Path) -> None:
    partial = prepare(tmp_path, 10, "1", Disk())
    (partial / "a").write_bytes(b"a")
    with expect_error(SaveError, field=("'a'", "'b'")):
        seal(partial, {"b": {"size": 1, "xxh3_128": "0"}}, CheckpointInfo(10), Disk())


def test_what_has_our_name_but_no_manifest_is_set_aside_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "mine").write_text("precious")
    assert scan(tmp_path) == []
    save(tmp_path, 10)
    (kept,) = (tmp_path / "quarantine").iterdir()
    assert (kept / "mine").read_text() == "precious"


def test_an_abandoned_future_is_set_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert steps_after(tmp_path, 10) == [20, 30]
    notes = set_aside(tmp_path, steps_after(tmp_path, 10), None, Disk())
    assert [note.split()[0] for note in notes[:2]] == ["checkpoint-30", "checkpoint-20"]
    assert linked_step(tmp_path, "latest") == 10
    assert [item.step for item in scan(tmp_path)] == [10]
