"""Paths, numbers and variables of the environment that no command can use: one message, exit code 2, and nothing is touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from rlhf_mcore.cli import agent
from rlhf_mcore.cli.main import main
from rlhf_mcore.rewards.pool import default_workers

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1"
LONG = "x" * 5000
HF = ["convert", "--from", "hf", "--to", "hf"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside = tmp_path / "inside"
    shutil.copytree(SAMPLE, inside)
    (inside / "loop").symlink_to("loop")
    (inside / "kept").mkdir()
    (inside / "link").symlink_to("kept")
    monkeypatch.chdir(inside)
    return inside


def test_paths_and_sizes_that_cannot_be(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        ([*HF, LONG, "out"], "File name too long; correct the path"),
        (["migrate", "run.yaml", "-o", LONG], "File name too long"),
        (["doctor", "--quick", "--ranks", "9" * 400], "free memory, enough for"),
        ([*HF, "model", "out", "--shard-size", "9" * 400], "is not a size; write it as 500MB or 4GiB"),
        ([*HF, "model", "loop", "--overwrite"], "loop is a link to loop; give a directory as DST"),
        ([*HF, "model", "link", "--overwrite"], "link is a link to kept; give a directory as DST"),
        ([*HF, "model", ".", "--overwrite"], "contains SRC, which would be removed with it; give another DST"),
        ([*HF, str(SAMPLE / "model"), ".", "--overwrite"], "contains the working directory, which would be removed"),
    ]:
        before = sorted(path.relative_to(place.parent) for path in place.parent.rglob("*"))
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error and len(error) < 1000
        assert sorted(path.relative_to(place.parent) for path in place.parent.rglob("*")) == before


def test_a_world_that_cannot_be_is_told_whatever_the_rank_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variables, message in [
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 and LOCAL_RANK=0 must be between 0 and"),
        ({"RANK": "99"}, "RANK=99 and LOCAL_RANK=0 must be between 0 and"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE='x' is not a whole number"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 - 1"),
    ]:
        for command in [["train", "run.yaml"], ["doctor", "--quick"]]:
            good = {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29999",
            }
            monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
            for name, value in {**good, **variables}.items():
                monkeypatch.setenv(name, value)
            assert main(command) == 2
            error = capsys.readouterr().err
            assert message in error and "Traceback" not in error


def test_a_number_of_processes_that_cannot_be_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, most in [("x", 8), ("0", 8), ("-1", 8), ("1000000", 1)]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert default_workers() == min(most, len(os.sched_getaffinity(0)))


def test_a_working_directory_that_is_gone_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "gone").mkdir()
    os.chdir(place / "gone")
    (place / "gone").rmdir()
    assert main(["plan", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: the working directory has been removed; change into another one\n"
    os.chdir(place)


@pytest.mark.parametrize(
    "arguments", [["--run-id=../../../x"], ["--run-id=.."], ["--run-id=x", "experiment=../../../x"], ["--run-id=x"]]
)
def test_an_agent_writes_into_the_run_directory_only(
    place: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "outputs" / "sample" / "run").mkdir(parents=True)
    (place / "outputs" / "sample" / "run" / "logs").symlink_to(place / "kept")
    before = sorted(place.parent.rglob("*"))
    assert agent.main(["run.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    reason = (
        "a name without slashes" if len(arguments) > 1 else "use plain names" if ".." in arguments[0] else "is a link"
    )
    assert reason in error
    assert sorted(place.parent.rglob("*")) == before


def test_a_share_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for share in ["5%", "nan", "1"]:
        with pytest.raises(SystemExit) as ended:
            main(["prepare-data", "rows.jsonl", "--out", "out", "--eval-share", share])
        told = f"argument --eval-share: {share} is out of range; give a share from 0 to less than 1, such as 0.05\n"
        assert ended.value.code == 2 and capsys.readouterr().err.endswith(told)
