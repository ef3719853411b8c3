from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.run_directory import RunDirectory
from tests.messages import expect_error


def test_paths_are_those_of_the_design(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path), "project", "first")
    assert run.path == tmp_path / "project" / "first"
    assert run.metrics_path == run.path / "metrics.jsonl"
    assert run.rollouts_path(1) == run.path / "rollouts" / "step-000001.jsonl"
    assert run.rollouts_path(1).parent.is_dir()
    run.write_config("seed: 1\n")
    run.write_config("seed: 2\n", 0o600)
    assert (run.path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert (run.path / "config.yaml").read_text() == "seed: 2\n"
    run.close()


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    first = RunDirectory.create(str(tmp_path), "p", "e")
    with expect_error(ConfigError, value=f"process {os.getpid()}", remedy="experiment"):
        RunDirectory.create(str(tmp_path), "p", "e")
    RunDirectory.create(str(tmp_path), "p", "other").close()
    first.close()
    first.close()
    RunDirectory.create(str(tmp_path), "p", "e").close()


def test_a_file_system_without_locks_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with expect_error(ConfigError, field="output_dir", value="No locks available", remedy="choose"):
        RunDirectory.create(str(tmp_path), "p", "e")


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with expect_error(ConfigError, field="output_dir", value="Not a directory", remedy="choose"):
        RunDirectory.create(str(tmp_path / "file"), "p", "e")


@pytest.mark.parametrize("project, experiment", [("..", "e"), ("p", "../../e"), ("p", "/e"), ("", "e"), ("p", "")])
def test_names_that_lead_elsewhere_are_refused(project: str, experiment: str, tmp_path: Path) -> None:
    with expect_error(ConfigError, field=("project", "experiment", "output_dir"), remedy="plain names"):
        RunDirectory.create(str(tmp_path / "out"), project, experiment)
    assert not list(tmp_path.iterdir())


def test_metrics_of_earlier_runs_are_kept_apart(tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path), "p", "e")
    assert directory.set_aside_metrics() is None
    for text in ("first", "second"):
        directory.metrics_path.write_text(text)
        directory.rollouts_path(1).write_text(text)
        directory.set_aside_metrics()
    assert (directory.path / "metrics.1.jsonl").read_text() == "first"
    assert (directory.path / "metrics.2.jsonl").read_text() == "second"
    assert (directory.path / "rollouts.1/step-000001.jsonl").read_text() == "first"
    assert (directory.path / "rollouts.2/step-000001.jsonl").read_text() == "second"
    assert not directory.metrics_path.exists() and not (directory.path / "rollouts").exists()
    directory.close()


def test_a_start_that_recorded_nothing_is_not_an_earlier_run(tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path), "p", "e")
    directory.metrics_path.touch()
    (directory.path / "tensorboard").mkdir()
    assert directory.set_aside_metrics() is None
    assert [path.name for path in directory.path.iterdir()] == ["run.lock"]
    directory.close()


def test_records_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path), "p", "e")
    directory.cut_metrics(3)
    assert not directory.metrics_path.exists()
    lines = [f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in (0, 1, 2, 2, 3, 4)]
    directory.metrics_path.write_text("".join(lines) + "no record\n" + '{"step": 1, "cut sho')
    directory.cut_metrics(2)
    assert directory.metrics_path.read_text() == "".join(lines[:4])
    directory.close()
