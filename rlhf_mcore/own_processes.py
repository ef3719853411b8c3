"""Ends processes with their parents, and leaves none running. For Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

STARTED_BY = "RLHF_MCORE_STARTED_BY"  # process id of the parent, in the environment of its child

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 30.0


def end_with_parent(number: signal.Signals) -> None:
    """Receive signal ``number`` when the process that started this one ends; at once if it has ended already."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(os.environ.get(STARTED_BY, parent)):
        os.kill(os.getpid(), number)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: the usual 1,024 are too few for the sockets of some hundred ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that ``end_all(children())`` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> Iterator[int]:
    """Yield the ids of the processes whose parent is this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        status = _status(int(folder.name))
        if status is not None and int(status[1]) == os.getpid():
            yield int(folder.name)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits for its parent to read its exit code."""
    status = _status(pid)
    return status is None or status[0] == "Z"


def end_all(pids: Iterable[int]) -> None:
    """Kill children of this process with their process groups, and wait until they are gone."""
    pids = list(pids)
    for pid in pids:
        with contextlib.suppress(OSError):
            own_group = os.getpgid(pid) == pid
            (os.killpg if own_group else os.kill)(pid, signal.SIGKILL)
    end = time.monotonic() + _REAP_S
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.01)


def _status(pid: int) -> list[str] | None:
    """Read [state, parent, ...] of a process; None where it is gone."""
    try:
        # pid (name) state parent ...; the name may hold anything
        return (
            (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
