"""A checkpoint that an earlier release has written is resumed, and the run ends as it did then."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "checkpoint_v1"


def rows(path: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def test_a_checkpoint_of_format_1_goes_on_to_the_same_end(tmp_path: Path) -> None:
    for name in ("run.yaml", "train.jsonl", "reward.py"):
        shutil.copy(SAMPLE / name, tmp_path)
    shutil.copytree(SAMPLE / "model", tmp_path / "model")
    run = tmp_path / "outputs" / "sample" / "run"
    shutil.copytree(SAMPLE / "checkpoint-2", run / "checkpoint-2")
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_mcore.cli.main", "train", "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the run continues after step 2 of" in done.stdout and "holds no fingerprints" in done.stdout
    expected, found = rows(SAMPLE / "expected" / "metrics.jsonl"), rows(run / "metrics.jsonl")
    assert sorted(found) == [3, 4]
    for step in found:
        for name, value in expected[step].items():
            # Another processor adds in another order; on the one that wrote the sample the numbers are equal.
            assert found[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
    weights = load_file(run / "checkpoint-4" / "actor" / "model.safetensors")
    for name, tensor in load_file(SAMPLE / "expected" / "actor.safetensors").items():
        assert weights[name] == pytest.approx(tensor, abs=1e-4), name
