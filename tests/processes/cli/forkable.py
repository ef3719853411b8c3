"""A module whose ranks can be forks, used instead of rlhf_mcore.cli.train."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

IMPORTED_BY = 0  # id of the process that has imported the modules of the ranks


def preload(arguments: Sequence[str]) -> None:
    global IMPORTED_BY
    if "broken" in arguments:
        raise ValueError("no such key")
    IMPORTED_BY = os.getpid()


def main() -> int:
    rank, (folder, what) = os.environ["RANK"], sys.argv[1:]
    print(f"rank {rank} prints \N{LOWER ONE EIGHTH BLOCK}")
    print(f"rank {rank} complains", file=sys.stderr)
    found = {
        "forked": os.getppid() == IMPORTED_BY,
        "leads its session": os.getsid(0) == os.getpid(),
        "environment": {name: os.environ.get(name) for name in ("RANK", "LEFT_OUT")},
        "name": Path("/proc/self/comm").read_text().strip(),
        "default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "held": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    Path(folder, f"found-{rank}").write_text(json.dumps(found))
    if what == "sleep":
        time.sleep(60)
    if what == "raise":
        raise ValueError("a mistake in a rank")
    atexit.register(Path(folder, f"at-exit-{rank}").touch)
    threading.Timer(0.2, Path(folder, f"thread-{rank}").touch).start()
    return 7 * int(rank)
