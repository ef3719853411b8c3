"""Measure `rlhf-mcore plan --suggest` on one core, for large MoE models.

The benchmark measures whole commands, including the start of Python: Qwen3-30B-A3B without a world size, which fits no small
world, and DeepSeek-V3 (671B) on 1,024 GPUs. It counts the CPU seconds of the process, because other load changes them less than
wall time. The ratio is the larger quotient of seconds and goal, as the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "configs" / "models"
CASES = {  # name -> (model, arguments, goal in seconds)
    "30B-A3B": ("Qwen3-30B-A3B", [], 5.0),
    "671B": ("DeepSeek-V3", ["--world-size", "1024"], 15.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    quick = parser.parse_args().quick
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(1 if quick else 5):
        for name, (model, arguments, _) in CASES.items():
            rounds[name].append(measure(model, arguments))
    rows = {
        name: {
            "cpu_s": statistics.median(found["cpu_s"] for found in rounds[name]),
            "goal_s": goal,
            "rounds": rounds[name],
        }
        for name, (_, _, goal) in CASES.items()
    }
    for name, row in rows.items():
        print(f"{name}: {row['cpu_s']:.2f} CPU seconds, goal {row['goal_s']:g}")
    ratio = round(max(row["cpu_s"] / row["goal_s"] for row in rows.values()), 3)
    report("suggest", {"rows": rows}, ratio=ratio, goal=1.0, quick=quick)


def measure(model: str, arguments: list[str]) -> dict[str, float]:
    """Run the command once on one core. It exits with code 2, because the configuration itself does not fit."""
    keys = [f"model.path={MODELS / model}", "data.train=[absent.parquet]"]
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "plan", str(ROOT / "configs" / "base.yaml"), *keys]
    begun = time.perf_counter()
    with subprocess.Popen(
        [*command, *arguments, "--suggest", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=_on_one_core,
    ) as process:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2 and found["suggestions"], (process.returncode, found.get("suggestions"))
    wall_s = time.perf_counter() - begun
    return {"cpu_s": round(usage.ru_utime + usage.ru_stime, 3), "wall_s": round(wall_s, 3)}


def _on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
