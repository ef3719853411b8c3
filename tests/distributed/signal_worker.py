"""A rank that runs steps, handles signals between them, and ends like the trainer. Imports no torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.cli.terminal import REQUEUE
from tests.unit.checkpoint.saving import save

T = TypeVar("T")


class SlowDisk(Disk):
    """A slow disk, so that a second signal can arrive during a save."""

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        time.sleep(0.05)
        return action()


def main(run: Path) -> int:
    rank = int(os.environ["RANK"])
    with SignalRequests().listening() as requests:
        print(f"ready {rank}", flush=True)
        for step in range(1, 600):
            time.sleep(0.05)
            if requests.take_save():
                print(f"asked {rank}", flush=True)
            if requests.stop_requested:
                print(f"saving {rank}", flush=True)
                if rank == 0:
                    save(run, step, disk=SlowDisk())
                time.sleep(0.5 * rank)  # ranks do not end at the same instant
                return REQUEUE
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
