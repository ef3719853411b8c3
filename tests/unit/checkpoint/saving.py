"""A run directory with checkpoints of small files with known content, and disks that fail. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, read_manifest, verify

T = TypeVar("T")
TOKEN = "0a1b"
DOCUMENTS = {"trainer_state.json": b"{}", "dataloader.json": b"{}", "config.yaml": b"{}", "rng.safetensors": b"states"}


def contents(step: int, version: str = "first") -> dict[str, bytes]:
    """Return the files of a checkpoint, by relative path."""
    return {
        "actor/config.json": f'{{"step": {step}}}'.encode(),
        "actor/model.safetensors": f"weights {step} {version} ".encode() * 100,
        "actor/training/index.json": b'{"files": ["moments.safetensors"]}',
        "actor/training/moments.safetensors": f"moments {step} {version} ".encode() * 50,
        **DOCUMENTS,
    }


def complete(checkpoint: Path, model: str = "actor") -> list[Path]:
    """Write the missing files that a checkpoint needs in addition to the weights of a model. Returns the paths."""
    written = []
    for name, data in {**DOCUMENTS, f"{model}/config.json": b"{}"}.items():
        if not (checkpoint / name).exists():
            (checkpoint / name).write_bytes(data)
            written.append(checkpoint / name)
    return written


def save(
    run: Path,
    step: int,
    version: str = "first",
    *,
    disk: Disk | None = None,
    metrics: Mapping[str, float] | None = None,
    info: CheckpointInfo | None = None,
    token: str = TOKEN,
) -> Path:
    """Save a checkpoint in one process."""
    disk = disk or Disk()
    partial = prepare(run, step, token, disk)
    files = contents(step, version)
    for name, data in files.items():
        disk.make_directory((partial / name).parent)
        disk.perform("write", lambda path=partial / name, data=data: path.write_bytes(data), partial / name)
    entries = seal_files(partial, files, disk)
    seal(partial, entries, info or CheckpointInfo(step, metrics=metrics or {}), disk)
    return publish(run, step, partial, disk)


def read(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of an intact checkpoint, by relative path."""
    assert verify(checkpoint) == []
    return {name: (checkpoint / name).read_bytes() for name in read_manifest(checkpoint).files}


class KillingDisk(Disk):
    """Kills the process by SIGKILL before primitive ``at``, counted from 1. ``torn``: kills it in the middle of write ``at``."""

    def __init__(self, at: int, *, torn: bool = False):
        super().__init__()
        self._at, self._torn = at, torn
        self._lock = threading.Lock()
        self._done = 0

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        with self._lock:
            self._done += not self._torn or name == "write"
            if self._done == self._at:
                if self._torn:
                    action()
                    os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return action()


class FailingDisk(Disk):
    """Raises an OSError instead of acting, if ``fails(name, path)`` is true."""

    def __init__(self, number: int, fails: Callable[[str, Path], bool]):
        self.pauses: list[float] = []
        super().__init__(sleep=self.pauses.append)
        self._number, self._fails = number, fails

    def perform(self, name: str, action: Callable[[], T], path: Path) -> T:
        if self._fails(name, path):
            raise OSError(self._number, os.strerror(self._number), str(path))
        return action()


class RecordingDisk(Disk):
    """Records operations in order, as (name, path)."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Path]] = []
        self._lock = threading.Lock()

    def perform(self, name: str, action: Callable[[], T], path: Path) -> Any:
        with self._lock:
            self.log.append((name, path))
            return action()
