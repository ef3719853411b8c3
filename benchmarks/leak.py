"""Measure the growth of resident memory over the steps of a GRPO run, in % per step. On CUDA, torch's memory is measured too.

The slope is the median of the slopes between all pairs of steps (Theil 1950, Sen 1968), divided by the mean size. A single jump of the
allocator does not change it. The first steps, in which caches fill, do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch

from benchmarks.common import report
from benchmarks.one_process import trainer_of
from benchmarks.vs_trl import ROWS

GOAL = 0.05  # % of the mean per step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    steps = 40 if args.quick else args.steps
    resident: list[int] = []
    on_device: list[int] = []
    with trainer_of(replace(ROWS["small"], responses=32, tokens=32), steps) as trainer:
        while trainer.step() is not None:
            resident.append(resident_bytes())
            if torch.cuda.is_available():
                on_device.append(torch.cuda.memory_allocated())
            if len(resident) % 20 == 0:
                print(f"step {len(resident)}: {resident[-1] / 2**20:.1f} MiB", flush=True)
    warm_up = steps // 5
    found = {"resident": growth(resident[warm_up:])}
    if on_device:
        found["device"] = growth(on_device[warm_up:])
    details = {
        "growth_percent_a_step": found,
        "resident_bytes": resident,
        "device_bytes": on_device,
        "left_out": warm_up,
    }
    report("leak", details, ratio=max(found.values()), goal=GOAL, quick=args.quick)


def growth(sizes: Sequence[int]) -> float:
    """Return the slope in % of the mean per step."""
    slopes = [(sizes[b] - sizes[a]) / (b - a) for a, b in combinations(range(len(sizes)), 2)]
    return 100 * statistics.median(slopes) / statistics.mean(sizes)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
