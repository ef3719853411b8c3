"""What a Ray of the run's own leaves behind when everything is killed at once, and who removes it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from rlhf_mcore.rollout.remote.head import make_folder, remove_abandoned


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
