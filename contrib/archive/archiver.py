"""Pack dropped checkpoints into ``archive/checkpoint-<step>.tar.zst``, in the background.

An archive is read back before the original is removed. ``tar --zstd -xf`` unpacks an archive, and ``rlhf-mcore verify-checkpoint``
checks the result.
"""

from __future__ import annotations

import os
import queue
import tarfile
import threading
from functools import reduce
from io import BufferedReader
from operator import and_
from pathlib import Path
from typing import cast

import zstandard

from rlhf_mcore.checkpoint.disk import Disk, SaveError, fsync
from rlhf_mcore.checkpoint.housekeeping import remove
from rlhf_mcore.checkpoint.layout import ARCHIVE, MANIFEST, Checkpoint
from rlhf_mcore.checkpoint.manifest import files_below, hash_content, read_manifest
from rlhf_mcore.own_files import open_own

LEVEL = 3


def pack(checkpoint: Path, folder: Path, disk: Disk) -> Path:
    """Pack a checkpoint into ``folder/<name>.tar.zst`` and read it back. The checkpoint stays.

    Raises:
        SaveError: the archive differs from the checkpoint's manifest.
        OSError: the archive could not be written.
    """
    disk.make_directory(folder)
    target = folder / f"{checkpoint.name}.tar.zst"
    partial = folder / f".{target.name}.partial"
    try:
        disk.perform("write", lambda: _write(checkpoint, partial), partial)
        disk.perform("fsync", lambda: fsync(partial), partial)
        check(partial, checkpoint)
        disk.rename(partial, target)
        disk.sync_directory(folder)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target


def check(archive: Path, checkpoint: Path) -> None:
    """Compare the files of an archive with the manifest of its checkpoint.

    Raises:
        SaveError: a file differs or is missing; the message names the first such file.
    """
    expected = dict(read_manifest(checkpoint).files)
    with (
        archive.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as stream,
        tarfile.open(fileobj=stream, mode="r|") as tar,
    ):
        for member in tar:
            name = member.name.partition("/")[2]
            content = tar.extractfile(member)
            if name == MANIFEST or content is None:
                continue
            if expected.pop(name, None) != hash_content(cast(BufferedReader, content), member.size):
                raise SaveError(f"{archive.name}: {name} differs from the manifest of {checkpoint.name}")
    if expected:
        raise SaveError(f"{archive.name}: {sorted(expected)[0]} of {checkpoint.name} is missing")


class Archiver:
    """Archive checkpoints one by one in a thread of the first rank. It is the ``ArchiveHook`` of ``tidy``."""

    def __init__(self, run: Path, disk: Disk | None = None):
        self._run = run
        self._disk = disk or Disk()
        self._seen: set[int] = set()
        self._queue: queue.SimpleQueue[Checkpoint | None] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        # A daemon, so that the process can end at any time. The next start removes a half-packed archive.
        self._thread = threading.Thread(target=self._work, name="archive", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint, unless it was submitted before, including attempts that failed."""
        if checkpoint.step not in self._seen:
            self._seen.add(checkpoint.step)
            self._queue.put(checkpoint)

    def take_notes(self) -> list[str]:
        """Return one line for each checkpoint whose archiving succeeded or failed since the last call."""
        notes = []
        while not self._notes.empty():
            notes.append(self._notes.get())
        return notes

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until all queued checkpoints are archived, at most ``timeout_s``."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (checkpoint := self._queue.get()) is not None:
            try:
                self._notes.put(self._archive(checkpoint))
            except Exception as error:  # the checkpoint is still there, and the next one may succeed
                self._notes.put(f"{checkpoint.path.name} could not be archived and stays: {error}")

    def _archive(self, checkpoint: Checkpoint) -> str:
        digest = read_manifest(checkpoint.path).digest
        archive = pack(checkpoint.path, self._run / ARCHIVE, self._disk)
        if read_manifest(checkpoint.path).digest != digest:
            raise SaveError("it was saved again during archiving")
        remove(checkpoint, self._disk)
        return f"{checkpoint.path.name} archived to {archive.relative_to(self._run)}"


def _write(checkpoint: Path, target: Path) -> None:
    # An archive is as private as its most private file.
    mode = reduce(and_, ((checkpoint / name).stat().st_mode for name in files_below(checkpoint)))
    with (
        os.fdopen(open_own(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode & 0o777), "wb") as file,
        zstandard.ZstdCompressor(LEVEL).stream_writer(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name in files_below(checkpoint):
            tar.add(checkpoint / name, f"{checkpoint.name}/{name}", recursive=False, filter=_remove_owner)


def _remove_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
