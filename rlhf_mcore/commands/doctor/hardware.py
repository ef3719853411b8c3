"""Checks of the machine: GPUs, cores, memory, limits, the sandbox, and the disk of the run directory."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.commands.doctor.findings import Finding, judge
from rlhf_mcore.machine import Gpu, memory_bytes, numa_node
from rlhf_mcore.sandbox.run import REMEDIES, Level

GIB = 1 << 30
_SLOW = 200e6  # bytes/s
_TELLING_BYTES = 64 << 20  # a shorter write measures latency, not throughput
_SKEW_S = 2.0
_OPEN_FILES = 65536  # recommended limit
# Descriptors of a rank: files, libraries and devices, and sockets to other ranks. We counted about 1,900 sockets for 512 ranks: 511
# in the gloo group of the world, 511 in vLLM's group, and 787 in the groups of the layout.
_FILES_OF_A_PROCESS, _FILES_OF_A_PEER = 512, 4


def check_gpus(gpus: list[Gpu] | str) -> Iterator[Finding]:
    """Check that GPUs are present, and check for memory in use by other processes and for memory errors."""
    if isinstance(gpus, str):
        yield judge("gpu", "error", gpus, "broken driver")
        return
    if not gpus:
        yield judge("gpu", "note", "none; runs use the CPU")
        return
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield judge("gpu", "warning", f"different models: {', '.join(names)}", "different gpus")
    else:
        yield judge("gpu", "ok", f"{len(gpus)} x {names[0]}, {gpus[0].memory_mib} MiB, driver {gpus[0].driver}")
    for index, gpu in enumerate(gpus):
        if gpu.used_mib > 0.05 * gpu.memory_mib:
            in_use = f"{gpu.used_mib} of {gpu.memory_mib} MiB are in use"
            yield judge(f"gpu {index}", "warning", in_use, "gpu memory in use")
        if gpu.uncorrected_errors:
            errors = f"{gpu.uncorrected_errors} uncorrected memory errors"
            yield judge(f"gpu {index}", "error", errors, "gpu memory errors")


def check_numa(gpus: list[Gpu], cores: set[int], sysfs: str = "/sys") -> Finding:
    """Report the NUMA node of each GPU, and whether ``cores`` includes cores of that node (see trainer.bind_numa)."""
    nodes = [numa_node(gpu.address, sysfs) for gpu in gpus]
    found = [f"GPU {index} on node {node[0]}" for index, node in enumerate(nodes) if node is not None]
    if not found:
        return judge("numa", "note", "one node, or unknown; ranks are not bound to cores")
    far = [f"GPU {index}" for index, node in enumerate(nodes) if node is not None and not node[1] & cores]
    if far:
        return judge("numa", "warning", f"{', '.join(found)}; no usable core on the node of {', '.join(far)}")
    return judge("numa", "ok", f"{', '.join(found)}; each rank runs on the cores of its node")


def check_cores(environment: Mapping[str, str], cores: int, num_ranks: int) -> Finding:
    """Compare the number of threads of all ranks with the number of cores that this process may use."""
    stated = environment.get("OMP_NUM_THREADS", "")
    if not stated.isdigit():
        text = f"{cores} cores, OMP_NUM_THREADS is not set; `rlhf-mcore train` sets it for its ranks"
        return judge("threads", "note", text)
    if int(stated) * num_ranks > cores:
        text = f"{num_ranks} ranks x OMP_NUM_THREADS={stated} on {cores} cores"
        return judge("threads", "warning", text, fitting=max(cores // num_ranks, 1))
    return judge("threads", "ok", f"{num_ranks} ranks x {stated} on {cores} cores")


def check_products(environment: Mapping[str, str], kind: str) -> Finding:
    """Report the processor and MKL_CBWR, which determine the last bits of results on a CPU."""
    set_here = f"is {environment['MKL_CBWR']} here" if environment.get("MKL_CBWR") else "is AUTO in runs"
    where = "results of a run that resumes on another processor may differ in the last bits"
    return judge("processor", "note", f"{kind or 'unknown'}; MKL_CBWR {set_here}; {where}")


def check_shared_memory(has_gpu: bool, path: str = "/dev/shm") -> Finding:
    """Check the free space in /dev/shm, which NCCL, vLLM and torch use to exchange data within a node."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return judge("shared memory", "error", f"{path}: {error.strerror}", "no shared memory")
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    room = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in {path}"
    return judge("shared memory", "ok" if free >= (GIB if has_gpu else GIB // 8) else "error", room)


def check_limits(has_infiniband: bool, world_size: int) -> Iterator[Finding]:
    """Check the limits of open files (sockets between ranks) and of locked memory (InfiniBand)."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # ranks raise theirs to the hard limit
    yield open_files(files, world_size)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked_memory(locked, has_infiniband)


def open_files(hard_limit: int, world_size: int) -> Finding:
    """Compare the hard limit of open files with the number that a rank in a world of this size needs."""
    need = _FILES_OF_A_PROCESS + _FILES_OF_A_PEER * world_size
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= need:
        shown = "unlimited" if hard_limit == resource.RLIM_INFINITY else f"at most {hard_limit}"
        return judge("open files", "ok", f"{shown}; a rank of {world_size} needs about {need}")
    text = f"at most {hard_limit}; a rank of {world_size} needs about {need}"
    return judge("open files", "error", text, files=max(_OPEN_FILES, need))


def locked_memory(limit: int, has_infiniband: bool) -> Finding:
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / (1 << 20):.0f} MiB"
    if not has_infiniband:
        return judge("locked memory", "ok", f"{shown}; only relevant for InfiniBand, which this machine does not have")
    return judge("locked memory", "ok" if limit == resource.RLIM_INFINITY else "error", shown)


def check_memory(path: str = "/proc/meminfo") -> Finding:
    """Check the available host memory."""
    if not (sizes := memory_bytes(path)):
        return judge("memory", "note", "unknown on this system")
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    room = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    return judge("memory", "ok" if free >= 4 * GIB else "warning", room)


def check_isolation(level: Level) -> Finding:
    """Check the isolation of programs that the reward rule ``code`` or a tool runs."""
    isolation = f"{level.name}: {', '.join(level.walls)}"
    if level.name == "namespaces" and not level.missing:
        return judge("sandbox", "ok", isolation)
    # The level filters is enough for the default of reward.sandbox.minimum.
    severity = "note" if level.reaches("filters") else "warning"
    return judge("sandbox", severity, f"{isolation}; missing: {'; '.join(level.missing)}", remedy=REMEDIES["filters"])


# ----------------------------------------------------------------------------------------------------- run directory
@dataclass(frozen=True, slots=True)
class DiskProbe:
    """Measurements of a write to disk. ``skew_s`` is the file system's clock minus this machine's clock."""

    free_bytes: int
    bytes_per_s: float
    commit_s: float  # fsync and rename of an empty file
    skew_s: float


def check_storage(run_dir: Path, probe_bytes: int) -> Iterator[Finding]:
    """Write ``probe_bytes`` under the nearest existing parent of ``run_dir``, judge the disk, and remove the file."""
    folder = run_dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        measured = probe(existing, probe_bytes)
    except OSError as error:
        yield judge("run directory", "error", f"{existing}: {error.strerror or error}")
        return
    yield from judge_disk(existing, measured, judge_speed=probe_bytes >= _TELLING_BYTES)


def probe(folder: Path, num_bytes: int) -> DiskProbe:
    """Measure the time of a write with fsync, and of a commit.

    Raises:
        OSError: the folder cannot be written.
    """
    block = os.urandom(1 << 20)  # random, because some file systems compress
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
    """Measure a commit like a checkpoint's. Returns its duration and the clock difference, both in seconds."""
    started = time.perf_counter()
    with open(scratch / "new", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch / "new", scratch / "old")
    elapsed = time.perf_counter() - started
    return elapsed, (scratch / "old").stat().st_mtime - time.time()


def judge_disk(folder: Path, measured: DiskProbe, *, judge_speed: bool = True) -> Iterator[Finding]:
    """Judge the measurements of a disk."""
    room = f"{measured.free_bytes / GIB:.0f} GiB free at {folder}"
    yield judge("disk space", "warning" if measured.free_bytes < 20 * GIB else "ok", room)
    speed = f"write {measured.bytes_per_s / 1e6:.0f} MB/s, commit {measured.commit_s * 1e3:.1f} ms"
    if judge_speed:
        severity = "warning" if measured.bytes_per_s < _SLOW else "ok"
        yield judge("disk speed", severity, speed, minutes=98e9 / measured.bytes_per_s / 60)
    else:
        yield judge("disk speed", "ok", f"{speed} (short write; leave out --quick for a long write)")
    if abs(measured.skew_s) > _SKEW_S:
        yield judge("clock", "warning", f"the file system's clock differs by {measured.skew_s:+.1f} s")
    else:
        yield judge("clock", "ok", f"within {_SKEW_S:.0f} s of the file system's")
