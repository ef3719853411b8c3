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

from rlhf_mcore.commands.doctor.findings import SYNCHRONISE, Finding, judge
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
_SHM = "start the container with --ipc=host or --shm-size=16g"


def check_gpus(gpus: list[Gpu] | str) -> Iterator[Finding]:
    """Check that GPUs are present, and check for memory in use by other processes and for memory errors."""
    if isinstance(gpus, str):
        remedy = "reinstall or reload the NVIDIA driver; reboot the node"
        yield Finding("gpu", "error", gpus, "runs cannot use the GPUs", remedy)
        return
    if not gpus:
        yield Finding("gpu", "note", "none; runs use the CPU")
        return
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        different = f"different models: {', '.join(names)}"
        yield Finding("gpu", "warning", different, "all GPUs wait for the slowest", "use one GPU model")
    else:
        yield Finding("gpu", "ok", f"{len(gpus)} x {names[0]}, {gpus[0].memory_mib} MiB, driver {gpus[0].driver}")
    for index, gpu in enumerate(gpus):
        if gpu.used_mib > 0.05 * gpu.memory_mib:
            yield Finding(
                f"gpu {index}",
                "warning",
                f"{gpu.used_mib} of {gpu.memory_mib} MiB are in use",
                "a run may run out of memory, because the engine takes a share of the whole device",
                "end the processes that nvidia-smi lists, or lower rollout.gpu_memory_utilization",
            )
        if gpu.uncorrected_errors:
            yield Finding(
                f"gpu {index}",
                "error",
                f"{gpu.uncorrected_errors} uncorrected memory errors",
                "results may be wrong and the process may be killed",
                "drain the node and reset or replace the GPU",
            )


def check_numa(gpus: list[Gpu], cores: set[int], sysfs: str = "/sys") -> Finding:
    """Report the NUMA node of each GPU, and whether ``cores`` includes cores of that node (see trainer.bind_numa)."""
    nodes = [numa_node(gpu.address, sysfs) for gpu in gpus]
    found = [f"GPU {index} on node {node[0]}" for index, node in enumerate(nodes) if node is not None]
    if not found:
        return Finding("numa", "note", "one node, or unknown; ranks are not bound to cores")
    far = [f"GPU {index}" for index, node in enumerate(nodes) if node is not None and not node[1] & cores]
    verdict = f"no usable core on the node of {', '.join(far)}" if far else "each rank runs on the cores of its node"
    return judge(
        "numa",
        "warning" if far else None,
        f"{', '.join(found)}; {verdict}",
        "copies between such a GPU and the host are slower",
        "allow cores of every node; check taskset, --cpu-bind of SLURM and --cpuset-cpus of Docker, which restrict them",
    )


def check_cores(environment: Mapping[str, str], cores: int, num_ranks: int) -> Finding:
    """Compare the number of threads of all ranks with the number of cores that this process may use."""
    stated = environment.get("OMP_NUM_THREADS", "")
    if not stated.isdigit():
        text = f"{cores} cores, OMP_NUM_THREADS is not set; `rlhf-mcore train` sets it for its ranks"
        return Finding("threads", "note", text)
    return judge(
        "threads",
        "warning" if int(stated) * num_ranks > cores else None,
        f"{num_ranks} ranks x OMP_NUM_THREADS={stated} on {cores} cores",
        "threads wait for each other in busy loops; runs become several times slower",
        f"set OMP_NUM_THREADS={max(cores // num_ranks, 1)} (trainer.threads_per_rank)",
    )


def check_products(environment: Mapping[str, str], kind: str) -> Finding:
    """Report the processor and MKL_CBWR, which determine the last bits of results on a CPU."""
    set_here = f"is {environment['MKL_CBWR']} here" if environment.get("MKL_CBWR") else "is AUTO in runs"
    where = "results of a run that resumes on another processor may differ in the last bits"
    return Finding("processor", "note", f"{kind or 'unknown'}; MKL_CBWR {set_here}; {where}")


def check_shared_memory(has_gpu: bool, path: str = "/dev/shm") -> Finding:
    """Check the free space in /dev/shm, which NCCL, vLLM and torch use to exchange data within a node."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding("shared memory", "error", f"{path}: {error.strerror}", "NCCL and vLLM fail at start", _SHM)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    return judge(
        "shared memory",
        None if free >= (GIB if has_gpu else GIB // 8) else "error",
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in {path}",
        "ranks of a node die with a bus error when shared memory is full",
        _SHM,
    )


def open_files(hard_limit: int, world_size: int) -> Finding:
    """Compare the hard limit of open files with the number that a rank in a world of this size needs."""
    need = _FILES_OF_A_PROCESS + _FILES_OF_A_PEER * world_size
    is_unlimited = hard_limit == resource.RLIM_INFINITY
    limit = max(_OPEN_FILES, need)
    return judge(
        "open files",
        None if is_unlimited or hard_limit >= need else "error",
        f"{'unlimited' if is_unlimited else f'at most {hard_limit}'}; a rank of {world_size} needs about {need}",
        "large worlds fail with 'too many open files', because every group opens sockets for every pair of its ranks",
        f"ulimit -Hn {limit}, LimitNOFILE of the service that starts jobs, or docker run --ulimit nofile={limit}:{limit}",
    )


def locked_memory(limit: int, has_infiniband: bool) -> Finding:
    """Check the limit of locked memory, which InfiniBand needs."""
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / (1 << 20):.0f} MiB"
    if not has_infiniband:
        shown += "; only relevant for InfiniBand, which this machine does not have"
    return judge(
        "locked memory",
        "error" if has_infiniband and limit != resource.RLIM_INFINITY else None,
        shown,
        "InfiniBand cannot register buffers: NCCL fails or uses slow sockets",
        "ulimit -l unlimited; in a container --ulimit memlock=-1; for SLURM PropagateResourceLimitsExcept=MEMLOCK",
    )


def check_memory(path: str = "/proc/meminfo") -> Finding:
    """Check the available host memory."""
    if not (sizes := memory_bytes(path)):
        return Finding("memory", "note", "unknown on this system")
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    return judge(
        "memory",
        None if free >= 4 * GIB else "warning",
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB available",
        "a rank needs about 1 GiB in addition to its weights; the kernel kills processes when memory runs out",
        "end other programs, or use fewer ranks",
    )


def check_isolation(level: Level) -> Finding:
    """Check the isolation of programs that the reward rule ``code`` or a tool runs."""
    isolation = f"{level.name}: {', '.join(level.walls)}"
    if level.name == "namespaces" and not level.missing:
        return Finding("sandbox", "ok", isolation)
    return judge(
        "sandbox",
        # The level filters is enough for the default of reward.sandbox.minimum.
        "note" if level.reaches("filters") else "warning",
        f"{isolation}; missing: {'; '.join(level.missing)}",
        "a run with the reward rule code, or a tool that runs programs, is rejected (reward.sandbox.minimum=filters)",
        REMEDIES["filters"],
    )


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
        problem = f"{existing}: {error.strerror or error}"
        yield Finding("run directory", "error", problem, "nothing can be saved", "choose another output_dir")
        return
    yield from judge_disk(existing, measured, judge_speed=probe_bytes >= _TELLING_BYTES)


def probe(folder: Path, num_bytes: int) -> DiskProbe:
    """Measure the time of a write with fsync, and of a commit like a checkpoint's.

    Raises:
        OSError: the folder cannot be written.
    """
    block = os.urandom(1 << 20)  # random, because some file systems compress
    count = max(num_bytes // len(block), 1)
    with tempfile.TemporaryDirectory(prefix=".rlhf_mcore-doctor-", dir=folder) as name:
        scratch = Path(name)
        write_s = _write(scratch / "data", [block] * count)
        started = time.perf_counter()
        _write(scratch / "new", [b"x"])
        os.replace(scratch / "new", scratch / "old")
        commit_s = time.perf_counter() - started
        skew_s = (scratch / "old").stat().st_mtime - time.time()
    return DiskProbe(shutil.disk_usage(folder).free, count * len(block) / write_s, commit_s, skew_s)


def _write(path: Path, blocks: list[bytes]) -> float:
    """Write and fsync a file. Returns the duration in seconds."""
    started = time.perf_counter()
    with open(path, "wb") as file:
        file.writelines(blocks)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def judge_disk(folder: Path, measured: DiskProbe, *, judge_speed: bool = True) -> Iterator[Finding]:
    """Judge the measurements of a disk."""
    yield judge(
        "disk space",
        "warning" if measured.free_bytes < 20 * GIB else None,
        f"{measured.free_bytes / GIB:.0f} GiB free at {folder}",
        "a full checkpoint takes 14 bytes per parameter: 98 GB for 7B",
        "choose an output_dir with more free space, or set checkpoint.save_total_limit",
    )
    short = "" if judge_speed else " (short write; leave out --quick for a long write)"
    yield judge(
        "disk speed",
        "warning" if judge_speed and measured.bytes_per_s < _SLOW else None,
        f"write {measured.bytes_per_s / 1e6:.0f} MB/s, commit {measured.commit_s * 1e3:.1f} ms{short}",
        f"one process writes a checkpoint of a 7B model (98 GB) in {98e9 / measured.bytes_per_s / 60:.0f} min",
        "use a parallel file system or a local disk as output_dir, and checkpoint.async_save",
    )
    if abs(measured.skew_s) > _SKEW_S:
        skew = f"the file system's clock differs by {measured.skew_s:+.1f} s"
        yield Finding("clock", "warning", skew, "checkpoints and logs have wrong times", SYNCHRONISE)
    else:
        yield Finding("clock", "ok", f"within {_SKEW_S:.0f} s of the file system's")
