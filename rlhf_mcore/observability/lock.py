"""A directory is held by one job at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_files import open_own


class DirectoryLock:
    """Holds the directory of ``file``, which names the holder, until it is closed or the process ends, however that ends.

    It is the kernel's lock (flock). A forked child lets go of it: one that outlives a killed job would keep the next job out.

    Raises:
        ConfigError: another process holds it; ``remedy`` is what the user may do instead of waiting.
        ConfigError: the file is a link.
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path, remedy: str) -> None:
        self._file = open_own(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
            self.close()
            raise ConfigError(
                f"{file.parent} is in use by another run ({holder}); wait for it to end, or {remedy}"
            ) from error
        with contextlib.suppress(OSError):  # for people: a full disk does not keep a run from what would free it
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _drop_in_forked_children(self)

    def close(self) -> None:
        """Let go. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _drop_in_forked_children(lock: DirectoryLock) -> None:
    reference = weakref.ref(lock)

    def drop() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=drop)
