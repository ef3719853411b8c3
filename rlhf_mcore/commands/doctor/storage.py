"""The file system of the run directory: room, speed, and whether its clock is ours."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.commands.doctor.findings import Finding, judge

GIB = 1 << 30
_SLOW = 200e6  # bytes/s
_TELLING_BYTES = 64 << 20  # what a shorter write shows is latency, not speed
_SKEW_S = 2.0


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """Hold what writing a file showed. ``skew_s`` is the file system's clock minus ours."""

    free_bytes: int
    bytes_per_s: float
    commit_s: float  # fsync and rename of an empty file
    skew_s: float


def check_storage(run_dir: Path, probe_bytes: int) -> Iterator[Finding]:
    """Write ``probe_bytes`` under the nearest existing parent of ``run_dir``, and take them away again."""
    folder = run_dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        measured = probe(existing, probe_bytes)
    except OSError as error:
        yield judge("run directory", "error", f"{existing}: {error.strerror or error}")
        return
    yield from judge_disk(existing, measured, judge_speed=probe_bytes >= _TELLING_BYTES)


def probe(folder: Path, num_bytes: int) -> DiskProbe:
    """Time a write with fsync, and a commit.

    Raises:
        OSError: the folder cannot be written.
    """
    block = os.urandom(1 << 20)  # some file systems compress
    with tempfile.TemporaryDirectory(prefix=".rlhf_mcore-doctor-", dir=folder) as scratch:
        started = time.perf_counter()
        with open(Path(scratch) / "data", "wb") as file:
            for _ in range(max(num_bytes // len(block), 1)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        elapsed = time.perf_counter() - started
        commit_s, skew_s = _commit(Path(scratch))
    written = max(num_bytes // len(block), 1) * len(block)
    return DiskProbe(shutil.disk_usage(folder).free, written / elapsed, commit_s, skew_s)


def _commit(scratch: Path) -> tuple[float, float]:
    """Time a commit as checkpoints make it. Returns its seconds, and the difference of the clocks."""
    started = time.perf_counter()
    with open(scratch / "new", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch / "new", scratch / "old")
    elapsed = time.perf_counter() - started
    return elapsed, (scratch / "old").stat().st_mtime - time.time()


def judge_disk(folder: Path, measured: DiskProbe, *, judge_speed: bool = True) -> Iterator[Finding]:
    """Judge what a probe means for a run."""
    room = f"{measured.free_bytes / GIB:.0f} GiB free at {folder}"
    yield judge("disk space", "warning" if measured.free_bytes < 20 * GIB else "ok", room)
    speed = f"write {measured.bytes_per_s / 1e6:.0f} MB/s, commit {measured.commit_s * 1e3:.1f} ms"
    if judge_speed:
        severity = "warning" if measured.bytes_per_s < _SLOW else "ok"
        yield judge("disk speed", severity, speed, minutes=98e9 / measured.bytes_per_s / 60)
    else:
        yield judge("disk speed", "ok", f"{speed} (a short write; without --quick a long one)")
    if abs(measured.skew_s) > _SKEW_S:
        yield judge("clock", "warning", f"the file system's clock differs by {measured.skew_s:+.1f} s")
    else:
        yield judge("clock", "ok", f"within {_SKEW_S:.0f} s of the file system's")
