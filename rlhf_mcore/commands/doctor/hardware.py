"""What the machine's numbers mean for a run: GPUs and driver, cores, memory, shared memory, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping

from rlhf_mcore.commands.doctor.findings import Finding
from rlhf_mcore.machine import Gpu, memory_bytes

GIB = 1 << 30
_OPEN_FILES, _ENOUGH_FILES, _FEW_FILES = 65536, 16384, 1024  # to ask for; no warning from; an error below
_DOCKER_SHM = "start the container with --ipc=host or --shm-size=16g"


def check_gpus(found: list[Gpu] | str) -> Iterator[Finding]:
    """Presence, memory that somebody else holds, and memory errors."""
    if isinstance(found, str):
        yield Finding(
            "gpu", "error", found, "runs cannot use the GPUs", "reinstall or reload the NVIDIA driver; reboot the node"
        )
        return
    if not found:
        yield Finding("gpu", "note", "none: runs use the CPU platform")
        return
    names = sorted({gpu.name for gpu in found})
    if len(names) > 1:
        yield Finding(
            "gpu", "warning", f"different models: {', '.join(names)}", "the slowest sets the pace", "use one kind"
        )
    else:
        yield Finding("gpu", "ok", f"{len(found)} x {names[0]}, {found[0].memory_mib} MiB, driver {found[0].driver}")
    for index, gpu in enumerate(found):
        if gpu.used_mib > 0.05 * gpu.memory_mib:
            yield Finding(
                f"gpu {index}",
                "warning",
                f"{gpu.used_mib} of {gpu.memory_mib} MiB are in use",
                "a run may be out of memory: the engine takes a share of the whole device",
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


def check_cores(environment: Mapping[str, str], cores: int, num_ranks: int) -> Finding:
    """Compute threads of all ranks against the cores that this process may use."""
    stated = environment.get("OMP_NUM_THREADS", "")
    if not stated.isdigit():
        return Finding(
            "threads", "note", f"{cores} cores, OMP_NUM_THREADS is not set; `rlhf-mcore train` sets it for its ranks"
        )
    if int(stated) * num_ranks > cores:
        return Finding(
            "threads",
            "warning",
            f"{num_ranks} ranks x OMP_NUM_THREADS={stated} on {cores} cores",
            "threads wait for each other spinning; everything slows down several times",
            f"set OMP_NUM_THREADS={max(cores // num_ranks, 1)} (trainer.threads_per_rank)",
        )
    return Finding("threads", "ok", f"{num_ranks} ranks x {stated} on {cores} cores")


def check_products(environment: Mapping[str, str], kind: str) -> Finding:
    """What the bits of a run on this processor depend on."""
    set_here = f"is {environment['MKL_CBWR']} here" if environment.get("MKL_CBWR") else "is AUTO in runs"
    where = "a run that is resumed on another kind may differ in the last bits"
    return Finding("processor", "note", f"{kind or 'unknown'}; MKL_CBWR {set_here}; {where}")


def check_shared_memory(has_gpu: bool, path: str = "/dev/shm") -> Finding:
    """Room in /dev/shm, through which NCCL, vLLM and torch exchange data within a node."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return Finding(
            "shared memory", "error", f"{path}: {error.strerror}", "NCCL and vLLM stop at start", _DOCKER_SHM
        )
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free in {path}"
    wanted = GIB if has_gpu else GIB // 8
    if free >= wanted:
        return Finding("shared memory", "ok", found)
    return Finding("shared memory", "error", found, "ranks of a node die with a bus error when it is full", _DOCKER_SHM)


def check_limits(has_infiniband: bool) -> Iterator[Finding]:
    """Open files (sockets between ranks) and locked memory (InfiniBand)."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(files)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked_memory(locked, has_infiniband)


def open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= _ENOUGH_FILES:
        return Finding("open files", "ok", "unlimited" if limit == resource.RLIM_INFINITY else str(limit))
    severity = "warning" if limit >= _FEW_FILES else "error"
    return Finding(
        "open files",
        severity,
        f"at most {limit}",
        "large worlds stop with 'too many open files': every pair of ranks has sockets, every group has pairs",
        f"ulimit -n {_OPEN_FILES}, or LimitNOFILE of the service that starts jobs",
    )


def locked_memory(limit: int, has_infiniband: bool) -> Finding:
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / (1 << 20):.0f} MiB"
    if limit == resource.RLIM_INFINITY or not has_infiniband:
        return Finding(
            "locked memory", "ok", shown if has_infiniband else f"{shown}; matters with InfiniBand, there is none"
        )
    return Finding(
        "locked memory",
        "error",
        shown,
        "InfiniBand cannot register buffers: NCCL stops or falls back to slow sockets",
        "ulimit -l unlimited; in a container --ulimit memlock=-1; for SLURM PropagateResourceLimitsExcept=MEMLOCK",
    )


def check_memory(path: str = "/proc/meminfo") -> Finding:
    """Host memory that is free for a run."""
    if not (sizes := memory_bytes(path)):
        return Finding("memory", "note", "unknown on this system")
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    if free >= 4 * GIB:
        return Finding("memory", "ok", found)
    return Finding(
        "memory",
        "warning",
        found,
        "a rank needs about 1 GiB beside its weights; the kernel kills processes when it ends",
        "end other programs, or use fewer ranks",
    )
