"""Read the properties of this machine: GPUs, processor, memory and installed versions. Imports no heavy library."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_SMI_FIELDS = (
    *("name", "memory.total", "memory.used", "driver_version", "ecc.errors.uncorrected.volatile.total"),
    "pci.bus_id",
)
_SMI_TIMEOUT_S = 10
# Fields of /proc/cpuinfo on x86 and ARM, and vector flags of both.
_PROCESSOR_NAMES = (("vendor_id", "CPU implementer"), ("model name", "CPU part"))
_VECTOR_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi reports it. Sizes in MiB."""

    name: str
    memory_mib: int
    used_mib: int
    driver: str
    uncorrected_errors: int
    address: str  # PCI address, such as 0000:1b:00.0


def query_gpus() -> list[Gpu] | str:
    """Return the GPUs of this machine, or nvidia-smi's message if it failed."""
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
    """Parse nvidia-smi's CSV output. Fields that a device does not support count as 0."""

    def number(field: str) -> int:
        return int(field) if field.isdigit() else 0

    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines()) if row]
    # nvidia-smi writes PCI domains with eight digits, Linux with four.
    return [Gpu(row[0], number(row[1]), number(row[2]), row[3], number(row[4]), row[5].lower()[-12:]) for row in rows]


def has_driver() -> bool:
    """Return whether NVIDIA's driver is loaded."""
    return Path("/dev/nvidiactl").exists()


def has_gpu() -> bool:
    """Return whether runs on this machine use GPUs: NVIDIA's driver is loaded, torch supports GPUs, and a device is visible."""
    return has_driver() and not is_torch_for_cpu() and count_visible(os.environ.get("CUDA_VISIBLE_DEVICES")) != 0


def is_torch_for_cpu() -> bool:
    """Return whether the installed torch is a CPU build, without importing it."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def count_visible(devices: str | None) -> int | None:
    """Return the number of devices in CUDA_VISIBLE_DEVICES, or None if it is not set. CUDA stops at the first invalid entry."""
    if devices is None:
        return None
    names = [name.strip() for name in devices.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))


def count_gpus() -> int | None:
    """Return the number of GPUs that processes of this machine may use, or None if nvidia-smi does not report it."""
    visible = count_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return visible
    gpus = query_gpus()
    return None if isinstance(gpus, str) else len(gpus) or None


def processor(path: str = "/proc/cpuinfo") -> str:
    """Return vendor, model and vector instructions of this machine's processor, or "" if unknown.

    Libraries choose kernels by these properties, so equal processors compute equal bits (see ``platform/cpu_libraries.py``).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = [fields.get(x86) or fields.get(arm, "") for x86, arm in _PROCESSOR_NAMES]
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    return " ".join(filter(None, [*names, *(flag for flag in _VECTOR_FLAGS if flag in flags)]))


def numa_node(address: str, sysfs: str = "/sys") -> tuple[int, set[int]] | None:
    """Return the NUMA node of a PCI device and the cores of that node, or None if the machine has one node or does not report it."""
    try:
        nodes = _numbers(Path(sysfs, "devices/system/node/online").read_text(encoding="ascii"))
        node = int(Path(sysfs, "bus/pci/devices", address, "numa_node").read_text(encoding="ascii"))
        if len(nodes) < 2 or node < 0:  # virtual machines often report -1
            return None
        return node, _numbers(Path(sysfs, f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(ranges: str) -> set[int]:
    """Parse a list of numbers in the format of Linux, such as 0-3,8."""
    pairs = [part.partition("-") for part in ranges.strip().split(",") if part]
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


_cores_before: int | None = None  # number of usable cores before ``bind_to_cores``


def bind_to_cores(cores: set[int]) -> None:
    """Restrict this process and its children to the allowed cores among ``cores``. New memory is allocated on their node."""
    global _cores_before
    allowed = os.sched_getaffinity(0)
    if not cores & allowed:  # another program has bound this process to other cores
        return
    _cores_before = _cores_before or len(allowed)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores & allowed)


def usable_cores() -> int:
    """Return the number of cores that this process could use before ``bind_to_cores``, which the processes of a node share."""
    return _cores_before or len(os.sched_getaffinity(0))


def has_infiniband() -> bool:
    """Return whether this machine has an RDMA device."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def memory_bytes(path: str = "/proc/meminfo") -> dict[str, int]:
    """Return memory sizes in bytes by the kernel's names, such as MemAvailable, or {} if the system does not report them."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith(" kB")}


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the distributions in ``names`` that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
