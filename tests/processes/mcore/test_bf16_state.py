"""Keep optimizer state in bf16 with Transformer Engine's FusedAdam and slow kernels, and change the choice on resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.mcore.bf16_state_worker import LR, STEPS

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(sys.prefix, "oracles")


@pytest.fixture(scope="module")
def findings() -> Any:
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES} (./launch/setup.sh installs it)")
    worker = str(Path(__file__).with_name("bf16_state_worker.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, worker, str(PACKAGES)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_weight_has_6_bytes_of_state_and_the_steps_are_adamws(findings: Any) -> None:
    """A bf16 moment has a relative error of 2^-9 per update, so a step of lr may differ by that share several times."""
    assert findings["bytes_per_weight"] == [12, 6]
    assert findings["norms_are_equal"] and findings["is_finite"]
    assert 0 < findings["difference_to_fp32"] < STEPS * LR * 2**-6
    assert findings["scalars"] == {"step": STEPS, "loss_scale": None}


def test_a_resumed_run_continues_bit_for_bit(findings: Any) -> None:
    assert findings["resumed"] == findings["continued"] == 0.0


def test_a_resumed_run_may_change_the_choice(findings: Any) -> None:
    """Files contain fp32. Loaded as bf16, only moments are rounded, and masters of ties move by their last bit."""
    assert findings["as_fp32"] == findings["as_hosted"] == 0.0
    assert findings["as_bf16"] <= 2**-24


def test_a_state_of_other_weights_is_rejected(findings: Any) -> None:
    assert "the weights differ from the rounded fp32 master weights" in findings["mixed"]
