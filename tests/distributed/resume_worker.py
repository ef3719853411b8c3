"""Two ranks open a run whose checkpoint takes longer to read than a rank waits for another one."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from rlhf_mcore.cli import compose
from rlhf_mcore.config.load import load_config
from rlhf_mcore.parallel.collectives import all_gather_json

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "checkpoint_v1"
TIMEOUT_S, READ_S = 4, 10
_hash = xxhash.xxh3_128


class SlowHash:
    """A hash that takes ``READ_S`` for all bytes of the checkpoint, and counts the bytes of this rank."""

    total = num_bytes = 0

    def __init__(self) -> None:
        self._hash = _hash()

    def update(self, data: Any) -> None:
        SlowHash.num_bytes += len(data)
        time.sleep(READ_S * len(data) / SlowHash.total)
        self._hash.update(data)

    def hexdigest(self) -> str:
        return str(self._hash.hexdigest())


def main(directory: Path) -> None:
    os.chdir(directory)
    run = directory / "outputs" / "sample" / "run" / "checkpoint-2"
    if os.environ["RANK"] == "0":
        shutil.copytree(SAMPLE, directory, dirs_exist_ok=True)
        shutil.copytree(SAMPLE / "checkpoint-2", run)
        (directory / "copied").touch()
    while not (directory / "copied").exists():
        time.sleep(0.05)
    SlowHash.total = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    xxhash.xxh3_128 = SlowHash
    compose.build_trainer = lambda run: None  # type: ignore[assignment,return-value]
    cfg = load_config("run.yaml", [f"trainer.collective_timeout_s={TIMEOUT_S}", "trainer.world_size=2"])
    with compose.open_run(cfg) as opened:
        parts = all_gather_json(SlowHash.num_bytes / SlowHash.total)
        if dist.get_rank() == 0:
            (directory / "findings.json").write_text(json.dumps({"parts": parts, "first_step": opened.first_step}))
