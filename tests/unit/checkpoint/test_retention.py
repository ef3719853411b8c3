from __future__ import annotations

import errno
import os
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard

from rlhf_mcore.checkpoint.archive import Archiver, check, pack
from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import recover, set_aside, tidy
from rlhf_mcore.checkpoint.layout import Checkpoint, scan
from rlhf_mcore.checkpoint.links import BestRule, read_pins
from rlhf_mcore.checkpoint.manifest import Base, CheckpointInfo, read_manifest, verify
from rlhf_mcore.checkpoint.retention import Retention, dropped, prune, prune_quarantine
from rlhf_mcore.commands.pin.command import pin, unpin
from rlhf_mcore.config.errors import ConfigError
from tests.messages import refused
from tests.unit.checkpoint.saving import FailingDisk, contents, save

ACCURACY = "evaluate/accuracy"
RULE = BestRule(ACCURACY)


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in scan(run)]


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 10, 9, 11):  # a step is a number, not a word
        save(tmp_path, step)
    assert [item.step for item in dropped(tmp_path, Retention(limit=None))] == []
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
    assert pin(tmp_path, 30, "good", Disk()) == tmp_path / "pins/good"
    assert pin(tmp_path, 30, "good", Disk()).resolve() == tmp_path / "checkpoint-30"  # said twice
    policy = Retention(limit=1, keep=(10, 60))
    tidy(tmp_path, policy, None, Disk())
    assert steps(tmp_path) == [10, 30, 50]
    unpin(tmp_path, "good", Disk())
    tidy(tmp_path, policy, None, Disk())
    assert steps(tmp_path) == [10, 50] and read_pins(tmp_path) == {}


def test_the_base_of_a_pinned_delta_stays(tmp_path: Path) -> None:
    digest = read_manifest(save(tmp_path, 10)).digest
    save(tmp_path, 20, info=CheckpointInfo(20, "delta", Base("checkpoint-10", digest)))
    for step in (30, 40):
        save(tmp_path, step)
    pin(tmp_path, 20, "good", Disk())
    prune(tmp_path, Retention(limit=1), Disk())
    assert steps(tmp_path) == [10, 20, 40]


def test_a_checkpoint_that_is_pinned_while_others_are_removed_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)

    class Pinning(Disk):
        def remove_tree(self, directory: Path) -> None:
            if "checkpoint-10" in directory.name:
                pin(tmp_path, 20, "late", Disk())
            super().remove_tree(directory)

    assert prune(tmp_path, Retention(limit=1), Pinning()) == [tmp_path / "checkpoint-10"]
    assert steps(tmp_path) == [20, 30]


def test_a_pinned_checkpoint_that_was_set_aside_stays_in_quarantine(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    pin(tmp_path, 20, "good", Disk())
    set_aside(tmp_path, [20], None, Disk())
    (tmp_path / "quarantine/checkpoint-2-x").mkdir()
    for age, path in enumerate(sorted((tmp_path / "quarantine").iterdir(), reverse=True)):
        os.utime(path, (1000 + age, 1000 + age))
    for name in ("a", "b"):
        (tmp_path / "quarantine" / name).mkdir()
    prune_quarantine(tmp_path, Disk())
    left = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert len(left) == 3 and left[:2] == ["a", "b"] and left[2].startswith("checkpoint-20-")


@pytest.mark.parametrize(
    ("step", "name", "message"),
    [
        (30, "good", r"STEP=30: .* has no checkpoint-30; it has 10, 20"),
        (10, "../good", "is not a plain name"),
        (10, "taken", "names checkpoint-20 already"),
        (10, "foreign", "names something else already"),
    ],
)
def test_pins_that_cannot_be_made(tmp_path: Path, step: int, name: str, message: str) -> None:
    for each in (10, 20):
        save(tmp_path, each)
    pin(tmp_path, 20, "taken", Disk())
    (tmp_path / "pins/foreign").symlink_to("/checkpoint-10")
    with pytest.raises(ConfigError, match=message):
        pin(tmp_path, step, name, Disk())
    assert read_pins(tmp_path) == {"taken": 20}  # what others have linked there is not ours
    with pytest.raises(ConfigError, match="no such pin; it has taken"):
        unpin(tmp_path, "foreign", Disk())


def test_a_pin_of_a_checkpoint_that_the_run_drops_at_that_moment_is_taken_back(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)

    class Racing(Disk):
        def symlink(self, link: Path, target: str) -> None:
            super().symlink(link, target)
            (tmp_path / "checkpoint-10").rename(tmp_path / ".checkpoint-10.removed")

    with pytest.raises(ConfigError, match="has removed checkpoint-10 just now"):
        pin(tmp_path, 10, "good", Racing())
    assert read_pins(tmp_path) == {}


def test_what_latest_names_stays_even_if_it_is_old(tmp_path: Path) -> None:
    for step in (20, 30, 10):  # the run went back to 10
        save(tmp_path, step)
    assert [item.step for item in dropped(tmp_path, Retention(limit=1))] == [20]


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


def test_what_is_dropped_is_archived_in_the_background(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    archiver = Archiver(tmp_path)
    for _ in range(2):  # the second time it is under way
        tidy(tmp_path, Retention(limit=1), None, Disk(), archiver)
    archiver.close()
    assert archiver.take_notes() == [
        "checkpoint-10 archived to archive/checkpoint-10.tar.zst",
        "checkpoint-20 archived to archive/checkpoint-20.tar.zst",
    ]
    assert steps(tmp_path) == [30]
    names = sorted(path.name for path in (tmp_path / "archive").iterdir())
    assert names == ["checkpoint-10.tar.zst", "checkpoint-20.tar.zst"]


def test_an_archive_is_a_tar_that_others_can_unpack(tmp_path: Path) -> None:
    archive = pack(save(tmp_path, 10), tmp_path / "archive", Disk())
    plain = tmp_path / "plain.tar"
    with archive.open("rb") as source, plain.open("wb") as target:
        zstandard.ZstdDecompressor().copy_stream(source, target)
    subprocess.run(["tar", "-xf", str(plain), "-C", str(tmp_path / "archive")], check=True)
    unpacked = tmp_path / "archive" / "checkpoint-10"
    assert verify(unpacked) == []
    assert {name: (unpacked / name).read_bytes() for name in contents(10)} == contents(10)
    with tarfile.open(plain) as tar:
        assert {(member.uid, member.uname) for member in tar} == {(0, "")}


def test_a_checkpoint_that_was_packed_wrong_stays(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    archive = pack(checkpoint, tmp_path / "archive", Disk())
    other = save(tmp_path / "other", 10, "second")
    with refused(SaveError, field="model.safetensors", value="manifest"):
        check(archive, other)
    (checkpoint / "trainer_state.json").write_bytes(b"[]")  # damaged since it was saved
    archiver = Archiver(tmp_path)
    archiver.submit(Checkpoint(10, checkpoint))
    archiver.close()
    (note,) = archiver.take_notes()
    assert "checkpoint-10 could not be archived and stays: .checkpoint-10.tar.zst.partial: trainer_state.json" in note
    assert checkpoint.is_dir()
    assert not list((tmp_path / "archive").glob(".*"))


def test_a_full_disk_keeps_the_checkpoint_and_its_half_archive_is_gone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 10)
    disk = FailingDisk(errno.ENOSPC, lambda name, path: name == "fsync" and path.suffix == ".partial")
    with pytest.raises(OSError, match="No space left"):
        pack(checkpoint, tmp_path / "archive", disk)
    assert verify(checkpoint) == []
    assert list((tmp_path / "archive").iterdir()) == []


def test_a_half_archive_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / ".checkpoint-5.tar.zst.partial").write_bytes(b"half")
    assert recover(tmp_path, None, Disk()) == ["unfinished archive/.checkpoint-5.tar.zst.partial removed"]


def test_the_end_of_a_run_does_not_wait_longer_than_asked(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(Disk):
        def perform(self, name, action, path):  # type: ignore[no-untyped-def]
            gate.wait(30)
            return super().perform(name, action, path)

    archiver = Archiver(tmp_path, Slow())
    archiver.submit(Checkpoint(10, save(tmp_path, 10)))
    archiver.close(timeout_s=0.01)
    assert steps(tmp_path) == [10]
    gate.set()
    archiver.close()
    assert steps(tmp_path) == []
