"""Kill many runs in one run directory at random boundaries, with full and delta saves, retention and recovery.

``python -m tests.processes.checkpoint.soak DIRECTORY SEED KILLS`` prints the findings after each kill as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import Retention, recover, tidy
from rlhf_mcore.checkpoint.layout import linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import DELTA, FULL, CheckpointInfo
from rlhf_mcore_contrib.deltas.write import choose_base, encode
from tests.unit.checkpoint.saving import KillingDisk, complete

STEPS_PER_RUN = 12
NAME = "model.safetensors"


def weights(step: int) -> np.ndarray:
    """Return the weights of the model at this step."""
    return np.random.default_rng(0).normal(size=500).astype(np.float32) * np.float32(1 + step / 1000)


def train(run: Path, reported: Path, disk: Disk) -> None:
    """Run from the newest checkpoint. It saves every step, and records the step after each commit."""
    recover(run, None, disk)
    found = scan(run)
    first = found[-1].step + 1 if found else 1
    for step in range(first, first + STEPS_PER_RUN):
        save(run, step, disk)
        reported.write_text(str(step))
        tidy(run, Retention(limit=2), None, disk)


def save(run: Path, step: int, disk: Disk) -> None:
    partial, base = prepare(run, step, str(os.getpid()), disk), choose_base(run, 4)
    (partial / "actor").mkdir()
    path = partial / "actor" / NAME
    disk.perform("write", lambda: save_file({"w": weights(step)}, path), path)
    paths = encode(partial, [path], run / base.name) if base else [path]
    paths += complete(partial)
    seal(partial, seal_files(partial, paths, disk), CheckpointInfo(step, DELTA if base else FULL, base), disk)
    publish(run, step, partial, disk)


def killed_run(run: Path, reported: Path, disk: Disk) -> bool:
    child = os.fork()
    if child == 0:
        train(run, reported, disk)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WIFSIGNALED(status)


def look(run: Path, reported: Path) -> dict[str, Any]:
    """Return the state from which the next run would continue."""
    said = int(reported.read_text()) if reported.exists() else 0
    recover(run, None, Disk())
    found = scan(run)
    newest = found[-1] if found else None
    read = load_file(readable(newest.path) / NAME)["w"] if newest else None
    recover(run, None, Disk())  # restores the full copy of a delta
    return {
        "said": said,
        "newest": newest.step if newest else 0,
        "problems": [str(problem) for item in found for problem in verify_chain(item.path)],
        "same": newest is None or read.tobytes() == weights(newest.step).tobytes(),
        "linked": linked_step(run, "latest"),
        "left": [item.path.name for item in scan_transitional(run)],
        "count": len(found),
    }


def main(directory: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    run, reported = directory / "run", directory / "reported"
    found = []
    for _ in range(kills):
        disk = KillingDisk(chance.randint(1, 150), torn=chance.random() < 0.3)
        killed = killed_run(run, reported, disk)
        found.append({"killed": killed, **look(run, reported)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
