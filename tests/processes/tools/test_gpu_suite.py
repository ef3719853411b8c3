"""The suite for a GPU, on the CPU: its parts run apart, its table has every one of them, and its archive is small and whole."""

from __future__ import annotations

import os
import sys
import tarfile
from argparse import ArgumentParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, finished

TOOL = ROOT / "tools" / "gpu_suite.py"


@pytest.fixture(scope="module")
def suite() -> Any:
    spec = spec_from_file_location("gpu_suite", TOOL)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_suite"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_suite"]


def verdicts(table: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line.startswith("|")]
    return {part: [cells[4] for cells in lines if cells[0] == part] for part in {cells[0] for cells in lines}}


def test_parts_that_fail_or_take_too_long_or_cannot_run_hide_no_other(suite: Any, tmp_path: Path) -> None:
    late = suite.Part("machine", 0.05, suite.machine)
    unknown = suite.Part("no such part", 60, suite.machine)
    assert suite.run_part(late, "cpu", tmp_path, 600)[0][1::2] == ["stopped after 0 s: see machine.log", "WRONG"]
    assert "failed with 2" in suite.run_part(unknown, "cpu", tmp_path, 600)[0][1]
    assert "25 minutes are over" in suite.run_part(late, "cpu", tmp_path, 5)[0][1]


def test_a_device_that_is_not_there_is_refused(suite: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parser = ArgumentParser()
    with pytest.raises(SystemExit, match="2"):
        suite._device(parser, "cuda")
    assert "torch finds no CUDA device" in capsys.readouterr().err
    assert suite._device(parser, None) == suite._device(parser, "cpu") == "cpu"
    assert "tiny sizes on the CPU" in capsys.readouterr().err


def test_saves_and_moves_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--device", "cpu", "--only", "offload", "save", "--out", "found"]
    done = finished(command, tmp_path)
    assert done.returncode == 0, done.stdout + "".join(path.read_text() for path in tmp_path.glob("found/*.log"))
    found = verdicts(done.stdout)
    assert found == {"offload": ["-", "-", "ok", "ok", "-", "-"], "save": ["-"] * 4}
    assert (tmp_path / "found" / "table.md").read_text() in done.stdout


@pytest.mark.matrix
def test_all_parts_on_the_cpu_out_of_the_archive(suite: Any, tmp_path: Path) -> None:
    assert suite.pack(tmp_path / "suite.tar.gz") == 0
    with tarfile.open(tmp_path / "suite.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "tools/gpu_suite.py", "--out", "found"]  # on a CPU where there is no GPU
    done = finished(command, tmp_path / "suite", {**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout
    assert set(verdicts(done.stdout)) == {part.name for part in suite.PARTS}
