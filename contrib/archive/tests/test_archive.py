from __future__ import annotations

import errno
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard

from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import Retention, recover, tidy
from rlhf_mcore.checkpoint.layout import Checkpoint
from rlhf_mcore.checkpoint.manifest import verify
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore_contrib.archive.archiver import Archiver, check, pack
from tests.messages import expect_error
from tests.unit.checkpoint.saving import FailingDisk, contents, save
from tests.unit.checkpoint.test_permissions import mode
from tests.unit.checkpoint.test_permissions import save as save_with_mode
from tests.unit.checkpoint.test_retention import steps
from tests.unit.parallel.world import world
from tests.unit.test_own_files import elsewhere, is_untouched, run

__all__ = ["elsewhere", "run", "world"]


def test_what_is_dropped_is_archived_in_the_background(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    archiver = Archiver(tmp_path)
    for _ in range(2):  # the second submission is ignored
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
    with expect_error(SaveError, field="model.safetensors", value="manifest"):
        check(archive, other)
    (checkpoint / "trainer_state.json").write_bytes(b"[]")  # damaged after the save
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


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("setting", "expected"), [(None, 0o644), ("private", 0o600), ("0640", 0o640)])
def test_an_archive_is_as_private_as_its_most_private_file(tmp_path: Path, setting: str | None, expected: int) -> None:
    assert mode(pack(save_with_mode(tmp_path, setting), tmp_path / "archive", Disk())) == expected


def test_a_linked_archive_is_neither_filled_nor_cleared(run: Path, elsewhere: Path) -> None:
    (run / "archive").symlink_to(elsewhere)
    recover(run, None, Disk())
    with expect_error(ConfigError, field="archive", value="link"):
        pack(run / "checkpoint-10", run / "archive", Disk())
    (run / "archive").unlink()
    (run / "archive").mkdir()
    (run / "archive" / ".checkpoint-10.tar.zst.partial").symlink_to(elsewhere / "other" / "file")
    with pytest.raises(ConfigError, match="is a link"):
        pack(run / "checkpoint-10", run / "archive", Disk())
    assert is_untouched(elsewhere)
