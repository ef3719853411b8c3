from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_mcore.trainer import saving
from rlhf_mcore.trainer.saving import ModelSaver

pytestmark = pytest.mark.usefixtures("world")


def saver(directory: Path, every: int, num_steps: int = 7) -> ModelSaver:
    def write(path: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "model").write_text(path.parent.name)

    return ModelSaver({"actor": write, "critic": write}, directory, every, num_steps)


@pytest.mark.parametrize(("every", "steps"), [(0, [7]), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (9, [7])])
def test_which_steps_are_saved(tmp_path: Path, every: int, steps: list[int]) -> None:
    which = saver(tmp_path, every)
    for step in range(1, 8):
        which.after_step(step)
        done = [s for s in steps if s <= step]
        assert sorted(p.name for p in tmp_path.iterdir() if not p.is_symlink()) == [f"checkpoint-{s}" for s in done]
        if done:
            assert os.readlink(tmp_path / "latest") == f"checkpoint-{done[-1]}"  # relative: the run may be moved
            for role in ("actor", "critic"):
                assert (tmp_path / "latest" / role / "model").read_text() == f"checkpoint-{done[-1]}"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for _ in range(2):
        saver(tmp_path, 3).after_step(3)
    assert (tmp_path / "latest" / "actor" / "model").read_text() == "checkpoint-3"


def test_the_link_moves_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = saver(tmp_path, 1)
    which.after_step(1)
    replace, moves = os.replace, []

    def watched(source: Path, target: Path) -> None:
        moves.append((os.readlink(target), os.readlink(source)))  # until the instant of the move the old link stands
        replace(source, target)

    monkeypatch.setattr(saving.os, "replace", watched)
    which.after_step(2)
    assert moves == [("checkpoint-1", "checkpoint-2")]
    assert os.readlink(tmp_path / "latest") == "checkpoint-2"


def test_a_link_that_a_kill_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".latest.new").symlink_to("nowhere")
    saver(tmp_path, 1).after_step(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "latest"]


def test_a_save_that_fails_leaves_the_link(tmp_path: Path) -> None:
    saver(tmp_path, 1).after_step(1)

    def broken(path: Path) -> None:
        raise OSError("no space left on device")

    writers = dict(saver(tmp_path, 1).writers)
    with pytest.raises(OSError, match="no space left"):
        ModelSaver(writers | {"critic": broken}, tmp_path, 1, 7).after_step(2)
    assert os.readlink(tmp_path / "latest") == "checkpoint-1"
