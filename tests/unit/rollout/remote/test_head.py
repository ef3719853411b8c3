"""Leftovers of a run's own Ray after all its processes are killed at once, and their removal."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_mcore.rollout.remote.head import make_folder, remove_abandoned, remove_folder


def test_folders_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    for name in ("rlhf-ray-dead", "rlhf-ray-alive", "rlhf-ray-new", "other-dead"):
        (tmp_path / name / "session").mkdir(parents=True)
        if name != "rlhf-ray-new":  # it is being made
            (tmp_path / name / "lock").touch()
    held = os.open(tmp_path / "rlhf-ray-alive" / "lock", os.O_WRONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-dead", "rlhf-ray-alive", "rlhf-ray-new"]
    os.close(held)
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-dead", "rlhf-ray-new"]
    made = make_folder(tmp_path)
    remove_abandoned(tmp_path)  # it is held by this process
    assert made.is_dir()
    assert made.parent.parent == tmp_path and stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    remove_folder(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-dead", "rlhf-ray-new"]


def lay_fifo(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "lock")


def lay_fifo_with_reader(folder: Path) -> None:
    lay_fifo(folder)
    os.open(folder / "lock", os.O_RDONLY | os.O_NONBLOCK)


def lay_link_to_a_lock(folder: Path) -> None:
    folder.mkdir()
    (folder.parent / "lock").touch()
    (folder / "lock").symlink_to(folder.parent / "lock")


def lay_link_to_a_folder(folder: Path) -> None:
    (folder.parent / "victim").mkdir()
    (folder.parent / "victim" / "lock").touch()
    folder.symlink_to(folder.parent / "victim")


def lay_folder_for_a_lock(folder: Path) -> None:
    (folder / "lock").mkdir(parents=True)


def lay_file_for_a_folder(folder: Path) -> None:
    folder.touch()


def lay_folder_of_another_user(folder: Path) -> None:
    folder.mkdir()
    (folder / "lock").touch()
    os.chown(folder, 65534, 65534)


LAID = [function for name, function in sorted(globals().items()) if name.startswith("lay_")]


@pytest.mark.timeout(30)  # opening a FIFO waits for its other end
@pytest.mark.parametrize("lay", LAID)
def test_what_others_lay_at_such_a_name_hangs_nobody_and_stays(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    if lay is lay_folder_of_another_user and os.geteuid():
        pytest.skip("only root gives files away")
    lay(tmp_path / "rlhf-ray-laid")
    before = sorted(tmp_path.rglob("*"))
    made = make_folder(tmp_path)
    assert made.is_dir()
    remove_folder(made)
    assert sorted(tmp_path.rglob("*")) == before
