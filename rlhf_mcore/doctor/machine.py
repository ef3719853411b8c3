"""The machine: GPUs and driver, cores, memory, shared memory, limits. Reads the system, changes nothing."""

from __future__ import annotations

import csv
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rlhf_mcore.doctor.findings import Finding

GIB = 1 << 30
_SMI_FIELDS = ("name", "memory.total", "memory.used", "driver_version", "ecc.errors.uncorrected.volatile.total")
_SMI_TIMEOUT_S = 10
_OPEN_FILES, _ENOUGH_FILES, _FEW_FILES = 65536, 16384, 1024  # to ask for; no warning from; an error below
# Fields of /proc/cpuinfo, on x86 and on ARM, and flags of both.
_PROCESSOR_NAMES = (("vendor_id", "CPU implementer"), ("model name", "CPU part"))
_VECTOR_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16"),
)
_DOCKER_SHM = "start the container with --ipc=host or --shm-size=16g"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of nvidia-smi. Sizes in MiB."""

    name: str
    memory_mib: int
    used_mib: int
    driver: str
    uncorrected_errors: int


def query_gpus() -> list[Gpu] | str:
    """The GPUs of this machine, [] for none, or nvidia-smi's message when it failed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [] if not Path("/proc/driver/nvidia/version").exists() else "the driver is loaded, nvidia-smi is missing"
    command = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer in {_SMI_TIMEOUT_S} s"
    if done.returncode != 0:
        return (
            (done.stdout + done.stderr).strip().splitlines()[-1] if done.stdout + done.stderr else "nvidia-smi failed"
        )
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """The lines of nvidia-smi's CSV; a field that a device does not have counts as 0."""

    def number(field: str) -> int:
        return int(field) if field.isdigit() else 0

    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines()) if row]
    return [Gpu(row[0], number(row[1]), number(row[2]), row[3], number(row[4])) for row in rows]


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


def has_driver() -> bool:
    """Whether NVIDIA's driver is there."""
    return Path("/dev/nvidiactl").exists()


def has_gpu() -> bool:
    """Whether a run here computes on GPUs: with NVIDIA's driver, a torch that is not built for CPUs, and a visible device."""
    return has_driver() and not is_torch_for_cpu() and count_visible(os.environ.get("CUDA_VISIBLE_DEVICES")) != 0


def is_torch_for_cpu() -> bool:
    """Whether the installed torch is a build that knows no GPU. It is not imported."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def count_visible(devices: str | None) -> int | None:
    """How many devices a value of CUDA_VISIBLE_DEVICES names: CUDA reads it up to the first that is none. None where it is not set."""
    if devices is None:
        return None
    names = [name.strip() for name in devices.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))


def count_gpus() -> int | None:
    """How many GPUs processes of this machine may use; None where nvidia-smi does not tell."""
    visible = count_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return visible
    gpus = query_gpus()
    return None if isinstance(gpus, str) else len(gpus) or None


def processor(path: str = "/proc/cpuinfo") -> str:
    """The kind of this machine's processor: maker, model, and the vector instructions that libraries choose kernels by; "" if unknown.

    Two of one kind compute the same bits, see ``platform/matrix_products.py``.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = [fields.get(x86) or fields.get(arm, "") for x86, arm in _PROCESSOR_NAMES]
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    return " ".join(filter(None, [*names, *(flag for flag in _VECTOR_FLAGS if flag in flags)]))


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


def has_infiniband() -> bool:
    """Whether an RDMA device is there."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def memory_bytes(path: str = "/proc/meminfo") -> dict[str, int]:
    """Sizes of this machine's memory under the kernel's names, such as MemAvailable; {} on a system that does not tell."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith(" kB")}


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
