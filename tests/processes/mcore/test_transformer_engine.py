"""The layers that a GPU trains with are Transformer Engine's: every element of a checkpoint has a place in models made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import models

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = Path(sys.prefix, "oracles")
DENSE = ("", "world=4,tp=2,pp=2", "world=4,tp=2,cp=2,sequence_parallel=1")
EXPERTS = ("", "world=4,tp=2,ep=2,etp=1,sequence_parallel=1", "world=4,pp=2,ep=2")
EACH_KIND = [
    "llama:world=4,tp=2,pp=2",
    "qwen3_moe:world=4,tp=2,ep=2,sequence_parallel=1",
    "gpt_oss:world=2,ep=2",
    "deepseek_v3:world=4,tp=2,ep=2,sequence_parallel=1",
    "deepseek_v3_direct:",
    "deepseek_v3:world=4,tp=2,pp=2,mtp=1",
    "glm4_moe:world=2,ep=2,mtp=1",
    "gemma3_text:world=4,tp=2,cp=2",
    "olmo2:world=2,tp=2",
    "qwen3_next:world=4,tp=2,ep=2,sequence_parallel=1",
    "llama:world=4,tp=2,cp=2,fp8=1",
    "qwen3_moe:world=4,tp=2,ep=2,sequence_parallel=1,fp8=1",
]


def missed(orders: list[str]) -> dict[str, dict[str, int]]:
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES} (./launch/setup.sh installs it)")
    worker = str(Path(__file__).with_name("transformer_engine_worker.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, worker, str(PACKAGES), *orders], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_one_model_of_each_kind() -> None:
    assert missed(EACH_KIND) == {order: {} for order in EACH_KIND}


@pytest.mark.matrix
def test_every_model() -> None:
    even = [name for name in models.MODELS if name != "qwen3_seven"]  # of seven layers
    orders = [f"{name}:{layout}" for name in even for layout in DENSE]
    orders += [f"{name}:{layout}" for name in (*models.MOE_MODELS, *models.FURTHER_MODELS) for layout in EXPERTS]
    assert missed(orders) == {order: {} for order in orders}
