from __future__ import annotations

import errno
import os
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import (
    BestRule,
    Retention,
    checkpoints_to_delete,
    prune,
    prune_quarantine,
    read_pins,
    recover,
    set_aside,
    tidy,
)
from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import Base, CheckpointInfo, read_manifest
from tests.unit.checkpoint.saving import FailingDisk, save

ACCURACY = "evaluate/accuracy"
RULE = BestRule(ACCURACY)


def pin(run: Path, step: int, name: str) -> None:
    """Make the link of docs/operations/checkpoints.md."""
    (run / "pins").mkdir(exist_ok=True)
    (run / "pins" / name).symlink_to(f"../checkpoint-{step}")


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in scan(run)]


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9, 11):  # a step is a number, not a word
        save(tmp_path, step)
    assert [item.step for item in checkpoints_to_delete(tmp_path, Retention(limit=None))] == []
    prune(tmp_path, Retention(limit=3), Disk())
    assert steps(tmp_path) == [9, 10, 11]
    assert not list(tmp_path.glob(".checkpoint*"))


def test_the_best_and_every_kth_stay_beside_them(tmp_path: Path) -> None:
    for step, accuracy in ((10, 0.1), (20, 0.9), (30, 0.2), (35, 0.3), (40, 0.4)):
        save(tmp_path, step, metrics={ACCURACY: accuracy})
    notes = tidy(tmp_path, Retention(limit=1, keep_every=30), RULE, Disk())
    assert steps(tmp_path) == [20, 30, 40]
    assert notes == ["checkpoint-10 removed", "checkpoint-35 removed"]
    assert os.readlink(tmp_path / "best") == "checkpoint-20"


def test_named_and_pinned_steps_stay_beside_them(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    pin(tmp_path, 30, "good")
    policy = Retention(limit=1, keep=(10, 60))
    tidy(tmp_path, policy, None, Disk())
    assert steps(tmp_path) == [10, 30, 50]
    (tmp_path / "pins/good").unlink()
    tidy(tmp_path, policy, None, Disk())
    assert steps(tmp_path) == [10, 50] and read_pins(tmp_path) == {}


def test_the_base_of_a_pinned_delta_stays(tmp_path: Path) -> None:
    digest = read_manifest(save(tmp_path, 10)).digest
    save(tmp_path, 20, info=CheckpointInfo(20, "delta", Base("checkpoint-10", digest)))
    for step in (30, 40):
        save(tmp_path, step)
    pin(tmp_path, 20, "good")
    prune(tmp_path, Retention(limit=1), Disk())
    assert steps(tmp_path) == [10, 20, 40]


def test_a_checkpoint_that_is_pinned_while_others_are_removed_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)

    class Pinning(Disk):
        def remove_tree(self, directory: Path) -> None:
            if "checkpoint-10" in directory.name and not read_pins(tmp_path):
                pin(tmp_path, 20, "late")
            super().remove_tree(directory)

    assert prune(tmp_path, Retention(limit=1), Pinning()) == [tmp_path / "checkpoint-10"]
    assert steps(tmp_path) == [20, 30]


def test_a_pinned_checkpoint_that_was_set_aside_stays_in_quarantine(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    pin(tmp_path, 20, "good")
    set_aside(tmp_path, [20], None, Disk())
    (tmp_path / "quarantine/checkpoint-2-x").mkdir()
    for age, path in enumerate(sorted((tmp_path / "quarantine").iterdir(), reverse=True)):
        os.utime(path, (1000 + age, 1000 + age))
    for name in ("a", "b"):
        (tmp_path / "quarantine" / name).mkdir()
    prune_quarantine(tmp_path, Disk())
    left = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert len(left) == 3 and left[:2] == ["a", "b"] and left[2].startswith("checkpoint-20-")


def test_links_that_lead_elsewhere_are_no_pins(tmp_path: Path) -> None:
    save(tmp_path, 20)
    pin(tmp_path, 20, "good")
    (tmp_path / "pins/foreign").symlink_to("/checkpoint-10")
    (tmp_path / "pins/file").touch()
    assert read_pins(tmp_path) == {"good": 20}


def test_what_latest_names_stays_even_if_it_is_old(tmp_path: Path) -> None:
    for step in (20, 30, 10):  # the run went back to 10
        save(tmp_path, step)
    assert [item.step for item in checkpoints_to_delete(tmp_path, Retention(limit=1))] == [20]


def test_the_base_of_a_delta_stays_as_long_as_the_delta(tmp_path: Path) -> None:
    digest = read_manifest(save(tmp_path, 10)).digest
    for step in (20, 30):
        save(tmp_path, step, info=CheckpointInfo(step, "delta", Base("checkpoint-10", digest)))
    prune(tmp_path, Retention(limit=1), Disk())
    assert steps(tmp_path) == [10, 30]
    save(tmp_path, 40)
    prune(tmp_path, Retention(limit=1), Disk())
    assert steps(tmp_path) == [40]


def test_pruning_looks_at_the_disk_not_at_what_the_run_remembers(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "checkpoint-40").mkdir()  # no manifest: not ours to count or to remove
    (tmp_path / "checkpoint-old").mkdir()
    (tmp_path / "checkpoint-20" / "actor" / "notes.txt").write_text("mine")
    prune(tmp_path, Retention(limit=1), Disk())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-30",
        "checkpoint-40",
        "checkpoint-old",
        "latest",
    ]


def test_only_the_newest_of_the_quarantine_stay(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for age, name in enumerate(("d", "c", "b", "a")):
        (tmp_path / "quarantine" / name).mkdir(parents=True)
        os.utime(tmp_path / "quarantine" / name, (1000 + age, 1000 + age))
    tidy(tmp_path, Retention(), None, Disk())
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == ["a", "b"]


def test_a_removal_that_fails_is_said_and_does_not_end_the_run(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    disk = FailingDisk(errno.EACCES, lambda name, path: name == "unlink" and path.name == "config.json")
    (note,) = tidy(tmp_path, Retention(limit=1), None, disk)
    assert note.startswith("old checkpoints could not be removed: [Errno 13]")
    assert steps(tmp_path) == [20]


def test_a_half_archive_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / ".checkpoint-5.tar.zst.partial").write_bytes(b"half")
    assert recover(tmp_path, None, Disk()) == ["unfinished archive/.checkpoint-5.tar.zst.partial removed"]
