"""Report a full disk of the log, of torchrun's file or of the temporary folder."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_mcore.cli import agent, terminal
from rlhf_mcore.observability import rank_file
from rlhf_mcore.observability.files import full_disks
from rlhf_mcore.observability.rank_file import RankFiles
from tests.small_disk import small_disk


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "disk").mkdir()
    with small_disk(folder, 64) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        yield folder


class FullLog(io.StringIO):
    """A file on a full disk as standard error."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_fault_37_torchruns_file_is_whole_or_not_there(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(full / "attempt" / "error.json"))
    assert terminal.report(RuntimeError("the cause")) == 1
    assert not (full / "attempt" / "error.json").exists()
    assert "error: RuntimeError: the cause" in capsys.readouterr().err
    (full / "filler").unlink()
    terminal.report(RuntimeError("the cause"))
    assert json.loads((full / "attempt" / "error.json").read_text())["message"].startswith("RuntimeError: the cause")


def test_fault_37_the_launcher_is_told_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    files = RankFiles(lambda _pid: False)
    for name, value in {rank_file.VARIABLE: files.make(1), "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    rank_file.note_start()
    monkeypatch.setattr("sys.stderr", FullLog())
    assert terminal.report(RuntimeError("the cause")) == 1
    assert {rank: told["message"] for rank, told in files.read().items()} == {1: "RuntimeError: the cause"}


def test_fault_37_a_librarys_error_names_the_full_temporary_folder(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(full))
    terminal.report(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert f"No space left on device; the disk of {full} is full (0 bytes are free)" in capsys.readouterr().err


def test_disks_with_room_are_not_named_and_a_full_one_once(full: Path, tmp_path: Path) -> None:
    assert full_disks([tmp_path, "/", tmp_path / "absent", "/proc"]) == ""
    (full / "folder").mkdir()
    assert full_disks([full, full / "folder"]) == f"; the disk of {full} is full (0 bytes are free)"


def test_fault_37_a_node_keeps_its_exit_code_where_the_outcome_cannot_be_left(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", FullLog())
    agent._record(full / "outcome", 75, 0, 1.0)
    assert (full / "outcome").read_text() == ""  # sbatch ignores an empty value
