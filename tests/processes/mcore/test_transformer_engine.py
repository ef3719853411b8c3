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
# Every kind of layer, in layouts that divide it.
EACH_KIND = {
    "llama": "world=4,tp=2,pp=2",
    "qwen3_moe": "world=4,tp=2,ep=2,sequence_parallel=1",
    "mixtral": "world=4,tp=2,ep=2,etp=1,sequence_parallel=1",
    "gpt_oss": "world=2,ep=2",
    "deepseek_v3": "world=4,tp=2,ep=2,sequence_parallel=1",
    "deepseek_v3_direct": "",
    "gemma3_text": "world=4,tp=2,cp=2",
    "gemma4_text_moe": "world=4,tp=2,ep=2,sequence_parallel=1",
    "olmo2": "world=2,tp=2",
    "qwen3_next": "world=4,tp=2,ep=2,sequence_parallel=1",
    "nemotron_h": "world=4,tp=2,ep=2,sequence_parallel=1",
}
WITH_MTP = ["deepseek_v3:world=4,tp=2,pp=2,mtp=1", "glm4_moe:world=2,ep=2,mtp=1"]
WITH_FP8 = ["llama:world=4,tp=2,cp=2,fp8=1", "qwen3_moe:world=4,tp=2,ep=2,sequence_parallel=1,fp8=1"]
SEVEN_LAYERS = "qwen3_seven"  # two stages do not divide them


def find_unmapped(orders: list[str]) -> dict[str, dict[str, int]]:
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES} (./launch/setup.sh installs it)")
    worker = str(Path(__file__).with_name("transformer_engine_worker.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, worker, str(PACKAGES), *orders], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_every_element_of_every_model_has_a_place() -> None:
    others = {name: "world=4,tp=2,pp=2" for name in models.MODELS if name != SEVEN_LAYERS}
    others |= dict.fromkeys((*models.MOE_MODELS, *models.FURTHER_MODELS), "world=4,pp=2,ep=2")
    orders = [f"{name}:{layout}" for name, layout in (others | EACH_KIND).items()] + WITH_MTP + WITH_FP8
    assert find_unmapped(orders) == {order: {} for order in orders}
