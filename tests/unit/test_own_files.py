"""Check that a link at one of our file names never changes its target."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_mcore.bridge.files.formats.convert import whole_directory
from rlhf_mcore.checkpoint.commit import prepare
from rlhf_mcore.checkpoint.delta import readable
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import Retention, recover, remove, remove_partials, tidy
from rlhf_mcore.checkpoint.layout import Checkpoint
from rlhf_mcore.cli.main import main
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.observability.files import write_atomically
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.trackers import JsonlTracker
from rlhf_mcore.own_files import open_own, own_directory
from rlhf_mcore.trainer.resume import find_start
from tests.messages import expect_error
from tests.unit.checkpoint.saving import save

NAMES = ("checkpoint-1.partial-a", "checkpoint-2.partial-b", "other", ".checkpoint-9.tar.zst.partial")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Return another user's directory, with names that a run deletes in its own directory."""
    folder = tmp_path / "elsewhere"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("theirs")
    (folder / ".checkpoint-3.tar.zst.partial").write_text("theirs")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save(tmp_path / "run", 10).parent


def is_untouched(folder: Path) -> bool:
    return (folder / ".checkpoint-3.tar.zst.partial").read_text() == "theirs" and all(
        (folder / name / "file").read_text() == "theirs" for name in NAMES
    )


def test_directories_of_ours_are_made_once_and_are_no_links(tmp_path: Path) -> None:
    assert own_directory(tmp_path / "mine") == own_directory(tmp_path / "mine") == tmp_path / "mine"
    (tmp_path / "through").symlink_to(tmp_path / "mine")  # links above our names belong to the user
    assert own_directory(tmp_path / "through" / "inner").is_dir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    for name, message in (
        ("through", f"is a link to {tmp_path / 'mine'}"),
        ("dangling", "is a link"),
        ("file", "is not a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            own_directory(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        own_directory(tmp_path / "absent" / "inner")


def test_files_of_ours_are_regular_and_no_links(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("link", "is a link to target"), ("fifo", "is not a regular file")):
        with pytest.raises(ConfigError, match=message):
            open_own(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.close(open_own(tmp_path / "new", os.O_WRONLY | os.O_CREAT, 0o600))
    assert (tmp_path / "target").read_text() == "theirs" and (tmp_path / "new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["quarantine", "archive", "rollouts", "tensorboard", "run.lock"])
def test_a_run_whose_own_name_is_a_link_is_refused(tmp_path: Path, elsewhere: Path, name: str) -> None:
    target = elsewhere if name != "run.lock" else elsewhere / "other" / "file"
    folder = tmp_path / "out" / "p" / "e"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(target)
    with expect_error(ConfigError, field=name, value="link"):
        RunDirectory.create(str(tmp_path / "out"), "p", "e")
    assert is_untouched(elsewhere)


def test_rollouts_metrics_and_atomic_files_are_not_written_through_links(tmp_path: Path, elsewhere: Path) -> None:
    directory = RunDirectory.create(str(tmp_path / "out"), "p", "e")
    (directory.path / "rollouts").symlink_to(elsewhere)
    (directory.path / "metrics.jsonl").symlink_to(elsewhere / "other" / "file")
    (directory.path / f".config.yaml.{os.getpid()}.tmp").symlink_to(elsewhere / "other" / "file")
    actions: list[Callable[[], object]] = [
        lambda: directory.rollouts_path(1),
        lambda: JsonlTracker(directory.metrics_path),
        lambda: write_atomically(directory.path / "config.yaml", b"ours"),
    ]
    for action in actions:
        with pytest.raises(ConfigError, match="is a link to"):
            action()
    assert is_untouched(elsewhere)
    directory.close()


def test_a_linked_quarantine_is_neither_filled_nor_emptied(run: Path, elsewhere: Path) -> None:
    (run / "quarantine").symlink_to(elsewhere)
    partial = prepare(run, 20, "0a", Disk())
    with expect_error(ConfigError, field="quarantine", value="link"):
        recover(run, None, Disk())
    assert partial.is_dir()
    tidy(run, Retention(), None, Disk())
    remove_partials(run, Disk())
    assert is_untouched(elsewhere) and len(list(elsewhere.iterdir())) == len(NAMES) + 1


def test_a_removal_does_not_begin_elsewhere(run: Path, elsewhere: Path) -> None:
    (run / ".checkpoint-10.removed").symlink_to(elsewhere)
    remove(Checkpoint(10, run / "checkpoint-10"), Disk())
    assert is_untouched(elsewhere) and not (run / "checkpoint-10").exists()
    assert not (run / ".checkpoint-10.removed").is_symlink()


def test_a_model_is_not_made_whole_elsewhere(run: Path, elsewhere: Path) -> None:
    checkpoint = run / "checkpoint-10"
    (checkpoint / "actor" / "added").write_text("")
    digest = os.fspath(readable(checkpoint).parent.name).rpartition("-")[2]
    recover(run, None, Disk())
    for name in (".checkpoint-10.full", f".checkpoint-10.full-{digest}"):
        (run / name).symlink_to(elsewhere)
        with pytest.raises(ConfigError, match="is a link"):
            readable(checkpoint)
        (run / name).unlink()
        recover(run, None, Disk())
    assert is_untouched(elsewhere)


def test_a_conversion_does_not_empty_what_its_partial_names(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / ".hf.partial").symlink_to(elsewhere)
    with (
        pytest.raises(ConfigError, match=r"\.hf\.partial is a link"),
        whole_directory(tmp_path / "hf", overwrite=False),
    ):
        raise AssertionError("it began")
    assert is_untouched(elsewhere)


def test_a_checkpoint_that_is_a_link_is_refused_and_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = run.parent / "away"
    shutil.copytree(run / "checkpoint-10", away)
    (run / "checkpoint-20").symlink_to(away)
    with expect_error(ConfigError, field="checkpoint-20", value="link", remedy=f"checkpoint.resume={away}"):
        find_start(run, CheckpointConfig(), "")
    assert main(["verify-checkpoint", str(run)]) == 2
    assert f"checkpoint-20: a link to {away}: no run resumes from it" in capsys.readouterr().out
