"""The only place where this package changes the disk, one primitive at a time.

So every change is tried again when the storage fails for a moment, and tests can end the process, or fail, at any boundary.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rlhf_mcore.observability.files import free_bytes
from rlhf_mcore.own_files import own_directory

S = TypeVar("S")
T = TypeVar("T")

# Network storage returns these during a failover and then recovers. A full or read-only disk does not.
TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO})
WAITS_S = (0.1, 0.5, 2.0)
WORTH_BYTES = 16 * 2**20  # below it, starting threads takes longer than the work
MAX_THREADS = min(8, os.cpu_count() or 1)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Committed checkpoints are untouched. The message is the same on every rank."""


def is_transient(error: BaseException) -> bool:
    """Return whether asking the storage again may help."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


class Disk:
    """Changes files and directories; each change is tried again a bounded number of times when the storage fails for a moment.

    A failed fsync alone is never repeated: the kernel may have dropped the pages and report success the second time
    (https://wiki.postgresql.org/wiki/Fsync_Errors). ``write`` writes the whole file again; otherwise the save fails.

    Args:
        waits_s: pauses before each further attempt.
        sleep: replaces ``time.sleep``.
    """

    def __init__(self, waits_s: tuple[float, ...] = WAITS_S, sleep: Callable[[float], None] = time.sleep):
        self._waits_s = waits_s
        self._sleep = sleep

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        """Run one system call, or several of which an interruption has the effect of one before the first. Tests override it."""
        return action()

    def free_bytes(self, directory: Path) -> int | None:
        """Return the bytes free below a directory, None where unknown. Quotas are not considered."""
        return free_bytes(directory)

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents. It may exist already.

        Raises:
            ConfigError: ``path`` is a link, or no directory.
        """

        def make() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            own_directory(path)

        self._retry("mkdir", make, path)

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file and make its content durable."""

        def attempt() -> None:
            self.perform("write", lambda: _write(path, content), path)
            self.perform("fsync", lambda: fsync(path), path)

        self._retry_all(attempt)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file is replaced; an existing directory, unless empty, is an error."""
        self._retry("rename", lambda: os.replace(source, target), source)

    def symlink(self, link: Path, target: str) -> None:
        """Make a link at an unused name."""
        self._retry("symlink", lambda: os.symlink(target, link), link)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link, if it exists."""
        self._retry("unlink", lambda: path.unlink(missing_ok=True), path)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory and its content, if it exists. Links, also ``directory`` itself, are removed and not followed."""
        if directory.is_symlink():
            self.unlink(directory)
            return
        for folder, folders, files in os.walk(directory, topdown=False):
            for name in files:
                self.unlink(Path(folder, name))
            for name in folders:
                self._remove_folder(Path(folder, name))
        if directory.is_dir():
            self._remove_folder(directory)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        self._retry("fsync", lambda: fsync(directory), directory)

    def _remove_folder(self, path: Path) -> None:
        self._retry("rmdir", path.unlink if path.is_symlink() else path.rmdir, path)

    def _retry(self, name: str, action: Callable[[], T], path: Path) -> T:
        return self._retry_all(lambda: self.perform(name, action, path))

    def _retry_all(self, action: Callable[[], T]) -> T:
        for wait_s in self._waits_s:
            try:
                return action()
            except OSError as error:
                if not is_transient(error):
                    raise
                self._sleep(wait_s)
        return action()


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(content)
        while view:  # a single write may be short
            view = view[file.write(view) :]


def spread(function: Callable[[S], T], items: Iterable[S], num_bytes: int) -> list[T]:
    """Return ``[function(item) for item in items]``, computed in threads if ``num_bytes``, the size of all items, is worth it."""
    if num_bytes < WORTH_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(function, items))
