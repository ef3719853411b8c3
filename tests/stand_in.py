"""A stand-in for ``rlhf_mcore.cli.train`` in tests of launching. Its ranks count steps, without torch.

A rank writes its count after every step and resumes from it. It ends with code 75 after SIGUSR1 or SIGTERM. STAND_IN_FAILS
("RANK:STEP:CODE") makes a rank fail at a step, only if the rank started at 0 or STAND_IN_ALWAYS is set.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.config.load import load_config

STEP_S = 0.1


def main() -> int:
    """Count to trainer.num_steps. Returns the exit code."""
    cfg = load_config(sys.argv[1], sys.argv[2:])
    rank = os.environ["RANK"]
    folder = Path(cfg.output_dir) / cfg.project / cfg.experiment
    folder.mkdir(parents=True, exist_ok=True)
    count = folder / f"count-{rank}"
    start = int(count.read_text()) if count.exists() else 0
    cores = len(os.sched_getaffinity(0))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins at {start} on {cores} cores", file=sys.stderr, flush=True)
    failing = os.environ.get("STAND_IN_FAILS", "").split(":")
    with SignalRequests().listening() as requests:
        for step in range(start + 1, cfg.trainer.num_steps + 1):
            time.sleep(STEP_S)
            _write(count, str(step))
            if failing[:2] == [rank, str(step - start)] and (start == 0 or "STAND_IN_ALWAYS" in os.environ):
                print("the stand-in fails as it was told", file=sys.stderr, flush=True)
                return int(failing[2])
            if requests.stop_requested:
                return 75
    return 0


def _write(path: Path, text: str) -> None:
    """Write atomically, so that a killed process leaves the old text and not an empty file."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
