"""Resume a checkpoint of an earlier release. The run ends as it did with that release."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, files_below, hash_files, write_manifest
from tests.commands import run_command

# That release averaged over updates, and this one over the tokens of all updates.
WEIGHTED = {"loss/value", "loss/policy", "loss/total", "critic/values", "actor/approx_kl"}
SAMPLE = Path(__file__).resolve().parents[1] / "data" / "checkpoint_v1"


def rows(path: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def test_a_checkpoint_of_format_1_goes_on_to_the_same_end_and_past_a_damaged_one(tmp_path: Path) -> None:
    for name in ("run.yaml", "train.jsonl", "reward.py"):
        shutil.copy(SAMPLE / name, tmp_path)
    shutil.copytree(SAMPLE / "model", tmp_path / "model")
    run = tmp_path / "outputs" / "sample" / "run"
    shutil.copytree(SAMPLE / "checkpoint-2", run / "checkpoint-2")
    done = train(tmp_path)
    assert "the run continues after step 2 of" in done.stdout and "holds no fingerprints" in done.stdout
    expected, found = rows(SAMPLE / "expected" / "metrics.jsonl"), rows(run / "metrics.jsonl")
    assert sorted(found) == [3, 4]
    for step in found:
        for name, value in ((name, value) for name, value in expected[step].items() if name not in WEIGHTED):
            # Another processor sums in another order. On the processor that wrote the sample, the numbers are equal.
            assert found[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
        # Whitened advantages have a mean of 0 over the tokens of a step, and the ratio is near 1.
        assert found[step]["loss/policy"] == pytest.approx(0, abs=5e-3)
    weights = load_file(run / "checkpoint-4" / "actor" / "model.safetensors")
    for name, tensor in load_file(SAMPLE / "expected" / "actor.safetensors").items():
        assert weights[name] == pytest.approx(tensor, abs=1e-4), name
    a_state_with_a_nan_is_passed_over(tmp_path, run)


def a_state_with_a_nan_is_passed_over(directory: Path, run: Path) -> None:
    """Check that a resume skips a state with a NaN. The manifest contains its digest, as in a release without this check."""
    last = run / "checkpoint-4"
    file = next((last / "critic" / "training").glob("*.safetensors"))
    tensors = {name: np.array(tensor) for name, tensor in load_file(file).items()}
    name = next(name for name in tensors if name.startswith("exp_avg/"))
    tensors[name].flat[0] = np.nan
    save_file(tensors, file)
    names = [name for name in files_below(last) if name != "manifest.json"]
    write_manifest(last, hash_files(last, names), CheckpointInfo(4), Disk())
    expected = (last / "actor" / "model.safetensors").read_bytes()
    done = train(directory, "trainer.num_steps=5")
    assert (
        "checkpoint-4 is damaged" in done.stdout
        and f"{name.split('[')[0].replace('/', ' of tensor ')} has" in done.stdout
    )
    assert "the run continues after step 3 of 5" in done.stdout
    assert [path.name for path in (run / "quarantine").glob("checkpoint-4-*/manifest.json")] == ["manifest.json"]
    assert sorted(rows(run / "metrics.jsonl")) == [3, 4, 5]
    assert (last / "actor" / "model.safetensors").read_bytes() == expected  # the step was repeated


def train(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = ["logging.entropy_every=1", *arguments]  # that release always recorded the entropy
    done = run_command([sys.executable, "-m", "rlhf_mcore.cli.main", "train", "run.yaml", *settings], directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
