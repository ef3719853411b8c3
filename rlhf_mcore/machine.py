"""Read what this machine has: GPUs, processor, memory, installed versions. Imports nothing."""

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
# Fields of /proc/cpuinfo, on x86 and on ARM, and flags of both.
_PROCESSOR_NAMES = (("vendor_id", "CPU implementer"), ("model name", "CPU part"))
_VECTOR_FLAGS = (
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of nvidia-smi. Sizes in MiB."""

    name: str
    memory_mib: int
    used_mib: int
    driver: str
    uncorrected_errors: int
    address: str  # on the PCI bus, as 0000:1b:00.0


def query_gpus() -> list[Gpu] | str:
    """List the GPUs of this machine, or return nvidia-smi's message when it failed."""
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
    """Parse the lines of nvidia-smi's CSV; a field that a device does not have counts as 0."""

    def number(field: str) -> int:
        return int(field) if field.isdigit() else 0

    rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines()) if row]
    # nvidia-smi writes a PCI domain with eight digits, and Linux with four.
    return [Gpu(row[0], number(row[1]), number(row[2]), row[3], number(row[4]), row[5].lower()[-12:]) for row in rows]


def has_driver() -> bool:
    """Return whether NVIDIA's driver is there."""
    return Path("/dev/nvidiactl").exists()


def has_gpu() -> bool:
    """Return whether a run here computes on GPUs: with NVIDIA's driver, a torch that is not built for CPUs, and a visible device."""
    return has_driver() and not is_torch_for_cpu() and count_visible(os.environ.get("CUDA_VISIBLE_DEVICES")) != 0


def is_torch_for_cpu() -> bool:
    """Return whether the installed torch is a build that knows no GPU. It is not imported."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def count_visible(devices: str | None) -> int | None:
    """Count the devices that CUDA_VISIBLE_DEVICES names. CUDA reads it up to the first that is none. None where it is not set."""
    if devices is None:
        return None
    names = [name.strip() for name in devices.split(",")]
    return next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))


def count_gpus() -> int | None:
    """Count the GPUs that processes of this machine may use; None where nvidia-smi does not tell."""
    visible = count_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        return visible
    gpus = query_gpus()
    return None if isinstance(gpus, str) else len(gpus) or None


def processor(path: str = "/proc/cpuinfo") -> str:
    """Describe this machine's processor: maker, model, and the vector instructions that libraries choose kernels by; "" if unknown.

    Two of one kind compute the same bits, see ``platform/cpu_libraries.py``.
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
    """Find the NUMA node of a PCI device, and its cores. Returns None if the machine has one node, or does not tell."""
    try:
        nodes = _numbers(Path(sysfs, "devices/system/node/online").read_text(encoding="ascii"))
        node = int(Path(sysfs, "bus/pci/devices", address, "numa_node").read_text(encoding="ascii"))
        if len(nodes) < 2 or node < 0:  # virtual machines often report -1
            return None
        return node, _numbers(Path(sysfs, f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _numbers(ranges: str) -> set[int]:
    """Parse a list of Linux such as 0-3,8."""
    pairs = [part.partition("-") for part in ranges.strip().split(",") if part]
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


_cores_before: int | None = None  # it was bound


def bind_to_cores(cores: set[int]) -> None:
    """Run this process and its children on these cores only, as far as it may use them. New memory is on their node."""
    global _cores_before
    allowed = os.sched_getaffinity(0)
    if not cores & allowed:  # another program has bound it elsewhere
        return
    _cores_before = _cores_before or len(allowed)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores & allowed)


def usable_cores() -> int:
    """Count the cores that processes like this one share: those that this one might use before it was bound to some of them."""
    return _cores_before or len(os.sched_getaffinity(0))


def has_infiniband() -> bool:
    """Return whether an RDMA device is there."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def memory_bytes(path: str = "/proc/meminfo") -> dict[str, int]:
    """Sizes of this machine's memory under the kernel's names, such as MemAvailable; {} on a system that does not tell."""
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith(" kB")}


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
