"""A benchmark that takes too long ends with all that it has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import Row
from rlhf_mcore.own_processes import has_ended
from tests.commands import wait_for

SLOW = """
import pathlib, subprocess
child = subprocess.Popen(["sleep", "60"])  # as ranks and engines
pathlib.Path("child.new").write_text(str(child.pid))
pathlib.Path("child.new").rename("child")
child.wait()
"""


def test_what_a_benchmark_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "slow.py").write_text(SLOW)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "find_spec", lambda name: name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run.run(Row("slow", "never ends"), quick=True, timeout_s=5).verdict == "stopped after 5 s"
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: has_ended(child))
