"""The rules of the GPU suite: limits and order of its parts, its table, and an archive that contains what they need."""

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


def test_parts_that_show_the_most_come_first_and_all_have_their_time(suite: Any) -> None:
    limits = [part.limit_s for part in suite.PARTS]
    assert sum(limits[: suite.FIRST]) <= 5 * 60 and sum(limits) <= suite.TOTAL_S == 30 * 60
    assert set(suite.MEASURED) <= {part.name for part in suite.PARTS}
    assert {part.name for part in suite.PARTS if part.needs_vllm} == {"sleep", "vllm", "engines"}


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


# What a part imports of this project, and what the ranks of a training start with.
IMPORT_ALL = """
import ast, importlib, sys, torch
from pathlib import Path
sys.path.insert(0, "tools")
names = {"rlhf_mcore.cli.train", "rlhf_mcore.cli.main", "rlhf_mcore.rollout.hf"}
for node in ast.walk(ast.parse(Path("tools/gpu_suite.py").read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("rlhf_mcore", "tests", "benchmarks", "make_quickstart"):
        names.add(node.module)
for name in sorted(names):
    importlib.import_module(name)
print(len(names))
"""


def test_a_bare_machine_imports_from_the_archive_whatever_a_part_needs(suite: Any, bare: Path, unpacked: Path) -> None:
    paths = [unpacked, unpacked / "site", unpacked / "tools" / "standins"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = finished([str(bare), "-W", "ignore", "-c", IMPORT_ALL], unpacked, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 15


def test_a_part_runs_from_the_archive_and_its_table_is_written(bare: Path, unpacked: Path) -> None:
    command = [str(bare), "tools/gpu_suite.py", "--device", "cpu", "--out", "found", "--only", "machine", "vllm"]
    done = finished(command, unpacked, {**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    table = (unpacked / "found" / "table.md").read_text()
    assert table in done.stdout
    assert "| machine | device | CPU | - | - |\n" in table
    assert "| vllm | vllm | skipped: vLLM is not installed | - | - |\n" in table
