"""The processes below one: which there are, how much memory they hold, and how all of them are ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def descendants(root: int) -> list[int]:
    """List the processes that ``root`` has started, directly or not, and that are still below it; not ``root`` itself."""
    below: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    children = [int(child) for child in file.read().split()]
                    below += children
                    waiting += children
    return below


def kill_below(root: int) -> None:
    """Kill every descendant of ``root``, which must be their reaper (a subreaper, or the first process of a pid namespace).

    All are stopped before any is killed: a stopped process starts no other, and keeps its place among those that it may have.
    """
    stopped: set[int] = set()
    while new := set(descendants(root)) - stopped:
        for pid in new:
            with suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def memory_of(pids: list[int]) -> int:
    """Count the bytes of anonymous and shared memory that processes hold. What they share is counted in each of them."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    return total << 10


def tasks_of(user: int) -> int:
    """Count the processes and threads of a user, as the limit of processes does."""
    total = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total
