"""Change the disk. No other module of this package does this. Each change is one primitive operation.

So every change is retried if the storage fails temporarily. Tests can kill the process, or inject an error, at any
operation.
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

# Network storage returns these errors during a failover and then recovers. A full or read-only disk does not
# recover.
TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO})
WAITS_S = (0.1, 0.5, 2.0)
WORTH_BYTES = 16 * 2**20  # below this size, starting threads takes longer than the work
MAX_THREADS = min(8, os.cpu_count() or 1)


class SaveError(RuntimeError):
    """A checkpoint could not be written. Committed checkpoints are unchanged. The message is the same on every rank."""


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may help."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


class Disk:
    """Change files and directories. Retry each change a limited number of times if the storage fails temporarily.

    A failed fsync alone is never retried, because the kernel may have dropped the pages and report success the
    second time (https://wiki.postgresql.org/wiki/Fsync_Errors). Instead ``write`` writes the whole file again;
    other operations fail the save.

    Args:
        waits_s: pauses before each retry, in seconds.
        sleep: replaces ``time.sleep``.
    """

    def __init__(self, waits_s: tuple[float, ...] = WAITS_S, sleep: Callable[[float], None] = time.sleep):
        self._waits_s = waits_s
        self._sleep = sleep

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        """Run a system call, or several calls whose interruption equals an interruption before the first.

        Tests override it.
        """
        return action()

    def free_bytes(self, directory: Path) -> int | None:
        """Return the free bytes below a directory, or None if unknown. Quotas are ignored."""
        return free_bytes(directory)

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents. It may already exist.

        Raises:
            ConfigError: ``path`` is a link, or not a directory.
        """

        def make() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            own_directory(path)

        self._retry("mkdir", make, path)

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file, and make its content durable."""

        def attempt() -> None:
            self.perform("write", lambda: _write(path, content), path)
            self.perform("fsync", lambda: fsync(path), path)

        self._retry_all(attempt)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory.

        An existing file is replaced; an existing directory is an error unless it is empty.
        """
        self._retry("rename", lambda: os.replace(source, target), source)

    def symlink(self, link: Path, target: str) -> None:
        """Create a link at an unused name."""
        self._retry("symlink", lambda: os.symlink(target, link), link)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link, if it exists."""
        self._retry("unlink", lambda: path.unlink(missing_ok=True), path)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory and its content, if it exists.

        Links, including ``directory`` itself, are removed and not followed.
        """
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
    """Return ``[function(item) for item in items]``.

    Use threads if ``num_bytes``, the size of all items, is large enough.
    """
    if num_bytes < WORTH_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(function, items))
