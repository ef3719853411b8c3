"""Measure the processes, memory and scratch directory of a program, and remove its processes and scratch directory.

Only the standard library is imported, because this also runs in the sandbox's own interpreter.
"""

from __future__ import annotations

import glob
import os
import signal
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress

MAX_FILES = 4096  # files and directories; the same limit as for the in-memory file system
MAX_DEPTH = 100  # nested directories
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


# ------------------------------------------------------------------------------------------------------------- processes
def descendants(root: int) -> list[int]:
    """List the processes that ``root`` has started, directly or indirectly, and that are still its descendants."""
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

    All are stopped before any is killed. A stopped process cannot start others, and still counts towards the process limit.
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
    """Count the bytes of anonymous and shared memory of processes. Memory shared between them is counted in each."""
    total = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))
    return total << 10


def tasks_of(user: int) -> int:
    """Count the processes and threads of a user, like the kernel's process limit."""
    total = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


# ------------------------------------------------------------------------------------------------- the scratch directory
def make_scratch(sandbox: str) -> str:
    """Create an empty directory for ``remove_scratch_of(sandbox)``. ``sandbox`` is a unique name."""
    return tempfile.mkdtemp(prefix=_prefix(sandbox))


def remove_scratch_of(sandbox: str) -> None:
    """Remove the remaining directories that a sandbox has created with ``make_scratch``."""
    for path in glob.glob(glob.escape(os.path.join(tempfile.gettempdir(), _prefix(sandbox))) + "*"):
        remove(path)


def _prefix(sandbox: str) -> str:
    return f"rlhf_mcore-sandbox-{sandbox}-"


def remove(path: str) -> None:
    """Remove a directory with its contents, skipping entries that cannot be removed.

    Only one directory is open at a time, and ``..`` returns to its parent. The depth is therefore not limited by recursion,
    descriptors or path length. No other process may change the directory during the call.
    """
    with suppress(OSError):
        directory, names = os.open(path, _DIRECTORY), [""]
        # For each directory from ``path`` to the open one: the remaining names of its subdirectories.
        waiting = [_remove_files(directory)]
        while waiting:
            if waiting[-1]:
                name = waiting[-1].pop()
                with suppress(OSError):
                    os.chmod(name, 0o700, dir_fd=directory)
                    within = os.open(name, _DIRECTORY, dir_fd=directory)
                    os.close(directory)
                    directory = within
                    names.append(name)
                    waiting.append(_remove_files(directory))
                continue
            waiting.pop()
            name = names.pop()
            if waiting:
                above = os.open("..", _DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = above
                with suppress(OSError):
                    os.rmdir(name, dir_fd=directory)
        os.close(directory)
        os.rmdir(path)


def _remove_files(directory: int) -> list[str]:
    """Remove the files of an open directory. Return the names of its subdirectories."""
    with os.scandir(directory) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in names:
        if not is_directory:
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in names if is_directory]


def is_over(path: str, processes: Iterable[int], limit_bytes: int) -> bool:
    """Return whether a directory exceeds ``limit_bytes``, ``MAX_FILES`` or ``MAX_DEPTH``.

    Deleted files that ``processes`` still have open count too.
    """
    total, count, waiting = _open_bytes(path, processes), 0, [(path, 0)]
    while waiting and total <= limit_bytes and count <= MAX_FILES:
        directory, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return True
        with suppress(OSError), os.scandir(directory) as entries:  # it may have been removed in the meantime
            for entry in entries:
                count += 1
                if count > MAX_FILES:
                    break
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
    return total > limit_bytes or count > MAX_FILES


def _open_bytes(path: str, processes: Iterable[int]) -> int:
    """Count the bytes of deleted files that processes still have open, on the file system of ``path``."""
    sizes: dict[int, int] = {}
    with suppress(OSError):
        device = os.stat(path).st_dev
        for pid in processes:
            with suppress(OSError):
                for descriptor in os.listdir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        file = os.stat(f"/proc/{pid}/fd/{descriptor}")
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_dev == device:
                            sizes[file.st_ino] = file.st_blocks * 512
    return sum(sizes.values())
