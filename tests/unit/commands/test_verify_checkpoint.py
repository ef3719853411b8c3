from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_mcore.cli import saved_checkpoint
from rlhf_mcore.cli.main import main
from tests.unit.checkpoint.saving import save


@pytest.fixture(autouse=True)
def only_names_and_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these checkpoints are texts; test_saved_checkpoint has tensors."""
    monkeypatch.setattr(saved_checkpoint, "check_saved", lambda checkpoint, weights: None)


def run(*arguments: object) -> int:
    return main(["verify-checkpoint", *map(str, arguments)])


def test_an_intact_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(tmp_path, 20)
    assert run(checkpoint) == 0
    assert capsys.readouterr().out == f"{checkpoint}: intact\n"
    assert run(tmp_path / "latest") == 0
    assert capsys.readouterr().out == f"{checkpoint}: intact\n"


def test_every_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(tmp_path, 20)
    os.truncate(checkpoint / "actor" / "model.safetensors", 5)
    (checkpoint / "actor" / "config.json").unlink()
    (checkpoint / "trainer_state.json").write_text("[]")
    (checkpoint / "notes.txt").write_text("mine")
    assert run(checkpoint) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{checkpoint}: damaged"
    assert [line.split(": ")[:2] for line in lines[1:]] == [
        ["  actor/config.json", "missing"],
        ["  actor/model.safetensors", "truncated"],
        ["  notes.txt", "not in the manifest"],
        ["  trainer_state.json", "damaged"],
    ]
    assert run(checkpoint, "--quick", "--json") == 2
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["path"], report["intact"]) == (str(checkpoint), False)
    assert [problem["kind"] for problem in report["problems"]] == ["missing", "size", "extra"]  # no content was read


def test_pins_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (20, 30):
        save(tmp_path, step)
    (tmp_path / "pins").mkdir()
    for name in ("good", "better"):
        (tmp_path / "pins" / name).symlink_to("../checkpoint-20")
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{tmp_path / 'checkpoint-20'}: intact, pinned as better, good",
        f"{tmp_path / 'checkpoint-30'}: intact",
    ]


def test_extra_files_alone_do_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(tmp_path, 20)
    (checkpoint / "notes.txt").write_text("mine")
    assert run(checkpoint) == 0
    assert capsys.readouterr().out == f"{checkpoint}: intact\n  notes.txt: not in the manifest\n"


def test_all_checkpoints_of_a_run_and_its_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    (tmp_path / "best").symlink_to("checkpoint-15")
    (first / "trainer_state.json").write_text("")
    assert run(tmp_path) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{first}: damaged",
        "  trainer_state.json: truncated: 0 bytes, the manifest has 2",
        f"{second}: intact",
        f"{tmp_path / 'latest'}: intact",
        f"{tmp_path / 'best'}: damaged",
        "  best: links to checkpoint-15, which is not a checkpoint",
    ]


def test_a_checkpoint_without_a_manifest_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(tmp_path, 20)
    (checkpoint / "manifest.json").unlink()
    assert run(checkpoint) == 2
    assert "manifest.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, words", [("absent", "is not a directory"), (".", "contains neither a manifest.json nor")]
)
def test_where_there_is_no_checkpoint(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / name) == 2
    assert words in capsys.readouterr().err


def test_a_person_sees_how_many_bytes_were_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 20)
    checkpoint = save(tmp_path, 40)
    counted: list[int] = []

    @contextmanager
    def bar(console: object, what: str, total: int) -> Iterator[Callable[[int], None]]:
        yield counted.append
        counted.append(-total)

    monkeypatch.setattr("rlhf_mcore.commands.verify_checkpoint.progress_bar", bar)
    assert run(checkpoint.parent) == 0
    files = [path for path in tmp_path.glob("checkpoint-*/**/*") if path.is_file() and path.name != "manifest.json"]
    assert counted[-1] == -sum(path.stat().st_size for path in files) < 0 and sum(counted) == 0


def test_of_many_problems_the_first_are_named_and_all_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(tmp_path, 20)
    for number in range(5000):
        (checkpoint / f"note-{number:04}.txt").touch()
    (checkpoint / "trainer_state.json").unlink()
    assert run(checkpoint) == 2
    text = capsys.readouterr().out
    assert len(text) < 10_000 and text.count("\n") == 102
    assert text.endswith("  and 4,901 more: 4,900 extra, 1 missing\n")
    assert run(checkpoint, "--json") == 2
    (report,) = json.loads(capsys.readouterr().out)
    assert (len(report["problems"]), report["num_problems"], report["intact"]) == (100, 5001, False)
