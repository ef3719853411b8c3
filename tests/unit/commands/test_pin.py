from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.cli import saved_checkpoint
from rlhf_mcore.cli.main import main
from tests.unit.checkpoint.saving import save


def run(*arguments: object) -> int:
    return main(["pin", *map(str, arguments)])


def test_pins_are_made_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 20)
    assert run(tmp_path) == 0
    assert run(tmp_path, 20, "good") == 0
    assert run(tmp_path) == 0
    (tmp_path / "checkpoint-20").rename(tmp_path / "elsewhere")
    assert run(tmp_path) == 0
    assert run(tmp_path, "--remove", "good") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path} has no pins",
        f"{tmp_path / 'pins/good'} -> checkpoint-20: it stays until the pin is removed",
        "good -> checkpoint-20",
        "good -> checkpoint-20 (missing)",
        "good removed; its checkpoint stays as long as others of its age do",
    ]


def test_verify_checkpoint_tells_of_pins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_checkpoint, "check_saved", lambda checkpoint, weights: None)  # the files are texts
    for step in (20, 30):
        save(tmp_path, step)
    for name in ("good", "better"):
        assert run(tmp_path, 20, name) == 0
    capsys.readouterr()
    assert main(["verify-checkpoint", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{tmp_path / 'checkpoint-20'}: intact, pinned as better, good",
        f"{tmp_path / 'checkpoint-30'}: intact",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "RUN=absent is not a directory"),
        (["run", 20], "STEP=20 needs a NAME"),
        (["run", 30, "good"], "STEP=30: run has no checkpoint-30; it has 20"),
        (["run", 20, "good", "--remove", "good"], "--remove=good and STEP=20 exclude each other"),
        (["run", "--remove", "good"], "NAME=good: run has no such pin"),
    ],
)
def test_mistakes_are_told_in_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", 20)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
