"""Programs of agents end with the process that has started them, however that ends."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

# Each line is the id of a process group: the first time it is to be kept, the second time it has ended.
_PROGRAM = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
kept = set()
for line in open(0):
    kept ^= {int(line)}
for group in kept:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Keeper:
    """A process that kills the process groups it keeps when this process is gone.

    A group of its own outlives its parent, and nobody kills it where the parent is killed.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def keep(self, group: int) -> None:
        """Keep a process group."""
        self._tell(group)

    def release(self, group: int) -> None:
        """Forget a process group, which has ended."""
        self._tell(group)

    def _tell(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed the keeper
            self._process.stdin.write(f"{group}\n".encode())
