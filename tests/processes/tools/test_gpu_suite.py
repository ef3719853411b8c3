"""The suite for a GPU, on the CPU: its parts run apart, its table has every one of them, and its archive is small and whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from argparse import ArgumentParser
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

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


def verdicts(printed: str) -> dict[str, list[str]]:
    """By part, in the last table."""
    table = printed.partition("rows for docs/performance.md")[0].rpartition("|---|---|---|---|---|\n")[2]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {part: [cells[4] for cells in lines if cells[0] == part] for part in {cells[0] for cells in lines}}


def test_parts_that_fail_or_take_too_long_or_cannot_run_hide_no_other(suite: Any, tmp_path: Path) -> None:
    late = suite.Part("machine", 0.05, suite.machine)
    unknown = suite.Part("no such part", 60, suite.machine)
    assert suite.run_part(late, "cpu", tmp_path, 600)[0][1::2] == ["stopped after 0 s: see machine.log", "WRONG"]
    assert "failed with 2" in suite.run_part(unknown, "cpu", tmp_path, 600)[0][1]
    assert "30 minutes are over" in suite.run_part(late, "cpu", tmp_path, 5)[0][1]


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


def test_parts_that_show_the_most_come_first_and_all_have_their_time(suite: Any) -> None:
    limits = [part.limit_s for part in suite.PARTS]
    assert sum(limits[: suite.FIRST]) <= 5 * 60 and sum(limits) <= suite.TOTAL_S == 30 * 60
    assert set(suite.MEASURED) <= {part.name for part in suite.PARTS}


def test_rows_for_the_page_are_what_was_measured(suite: Any) -> None:
    found = {
        "machine": [suite.row("device", "H")],
        "mfu": [suite.row("tokens/s", 7), suite.row("TFLOP/s", 0, "> 1", ok=False)],
        "vllm": [suite.row("vllm", "skipped: vLLM is not installed")],
        "parity": [suite.row("logprobs", "1e-6", "< 1e-3", ok=True)],
    }
    assert suite.as_rows(found) == "| H | mfu | tokens/s | 7 |"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has torch, transformers and what these require, and nothing else."""
    target = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    (site,) = target.glob("lib/python*/site-packages")
    due, seen = ["torch", "transformers"], set[str]()
    while due:
        name = re.sub(r"[-_.]+", "-", due.pop()).lower()
        if name in seen or not (known := list(metadata.distributions(name=name))):
            continue
        seen.add(name)
        required = [Requirement(text) for text in known[0].requires or ()]
        due += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in known[0].files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(str(known[0].locate_file(top)))
    assert not {"xxhash", "zstandard", "omegaconf", "einops", "megatron-core"} & seen
    return target / "bin" / "python"


@pytest.fixture(scope="module")
def unpacked(suite: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    assert suite.pack(folder / "suite.tar.gz") == 0
    with tarfile.open(folder / "suite.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "suite"


def run_bare(bare: Path, unpacked: Path, *arguments: str, seconds: float = 240) -> str:
    command = [str(bare), "tools/gpu_suite.py", "--device", "cpu", "--out", "found", *arguments]
    done = finished(command, unpacked, {**os.environ, "PYTHONPATH": ""}, seconds)
    logs = "".join(path.read_text() for path in (unpacked / "found").glob("*.log"))
    assert done.returncode == 0, done.stdout + logs[-3000:]
    return done.stdout


def test_a_training_out_of_the_archive_on_a_bare_machine(bare: Path, unpacked: Path) -> None:
    printed = run_bare(bare, unpacked, "--only", "machine", "bf16", "grpo")
    assert verdicts(printed) == {"machine": ["-"] * 3, "bf16": ["-", "ok", "ok"], "grpo": ["ok", "ok", "-"]}
    assert "| CPU | grpo | grpo: whole run, last step, its sync |" in (unpacked / "found" / "rows.md").read_text()


@pytest.mark.matrix
@pytest.mark.timeout(40 * 60)
def test_all_parts_out_of_the_archive_on_a_bare_machine(suite: Any, bare: Path, unpacked: Path) -> None:
    printed = run_bare(bare, unpacked, seconds=suite.TOTAL_S)
    judged = verdicts(printed)
    assert judged.keys() == {part.name for part in suite.PARTS}
    assert {part for part, found in judged.items() if "ok" in found} == {
        "bf16",
        "grpo",
        "resume",
        "parity",
        "ppo",
        "offload",
    }
    assert {part.name for part in suite.PARTS if part.needs_vllm} == {"sleep", "vllm", "engines"}
    assert judged["sleep"] == judged["vllm"] == judged["engines"] == ["-"]
    assert printed.count("skipped: vLLM is not installed") == 3
