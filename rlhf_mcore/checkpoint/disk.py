"""Every change that this package makes to the disk, one primitive at a time.

Two things hang on there being a single door: storage that fails for a moment is asked again, and tests can end the process, or
fail, at any boundary.
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

# Network storage that is being failed over answers with these and recovers. A full or read-only disk does not.
TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO})
WAITS_S = (0.1, 0.5, 2.0)
WORTH_BYTES = 16 * 2**20  # below it, starting threads takes longer than the work
MAX_THREADS = min(8, os.cpu_count() or 1)


class SaveError(RuntimeError):
    """A checkpoint could not be written. What was committed before is untouched. The same message on every rank."""


def is_transient(error: BaseException) -> bool:
    """Whether asking the storage again may help."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


class Disk:
    """Changes to files and directories, each tried again a bounded number of times when the storage fails for a moment.

    An fsync that failed is never simply repeated: the kernel may have dropped the pages and report success the second time
    (https://wiki.postgresql.org/wiki/Fsync_Errors). What can be written again is, as a whole; else the save fails.

    Args:
        waits_s: pauses before each further attempt.
        sleep: replaces ``time.sleep``.
    """

    def __init__(self, waits_s: tuple[float, ...] = WAITS_S, sleep: Callable[[float], None] = time.sleep):
        self._waits_s = waits_s
        self._sleep = sleep

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        """One system call, or a run of calls whose cut in the middle is like one before it. Tests override it."""
        return action()

    def free_bytes(self, directory: Path) -> int | None:
        """What may still be written below a directory; None where nobody tells. Quotas are not known here."""
        return free_bytes(directory)

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents; it may be there, but is no link.

        Raises:
            ConfigError: it is a link, or no directory.
        """

        def make() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            own_directory(path)

        self._retried("mkdir", make, path)

    def write(self, path: Path, content: bytes) -> None:
        """Create or replace a file and make its content durable."""

        def attempt() -> None:
            self.perform("write", lambda: _write(path, content), path)
            self.perform("fsync", lambda: fsync(path), path)

        self._again(attempt)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file is replaced; an existing directory, unless empty, is an error."""
        self._retried("rename", lambda: os.replace(source, target), source)

    def symlink(self, link: Path, target: str) -> None:
        """Make a link at a name that is free."""
        self._retried("symlink", lambda: os.symlink(target, link), link)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link; it may be gone."""
        self._retried("unlink", lambda: path.unlink(missing_ok=True), path)

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory and what is in it; it may be gone. Links are removed, not followed, be it the directory's own name."""
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
        self._retried("fsync", lambda: fsync(directory), directory)

    def _remove_folder(self, path: Path) -> None:
        self._retried("rmdir", path.unlink if path.is_symlink() else path.rmdir, path)

    def _retried(self, name: str, action: Callable[[], T], path: Path) -> T:
        return self._again(lambda: self.perform(name, action, path))

    def _again(self, action: Callable[[], T]) -> T:
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
    """``[function(item) for item in items]``, in threads if ``num_bytes``, what they go through together, is worth it."""
    if num_bytes < WORTH_BYTES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return list(pool.map(function, items))
