"""Measure the cost of a pool of reward workers: responses per second, relative to the bare function in as many bare processes.

The function computes hashes for 5 ms or more of CPU time. Both sides run it in the same number of processes, in turn. The ratio
of a round compares neighbouring measurements. Each bare process has a separate session, like workers, because the kernel divides
a busy machine among sessions. The result contains wall and CPU seconds of all processes. The CPU ratio shows the cost of the
pool itself, independently of other load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOAL = 0.9
SOURCE = """\
import hashlib

def grade(data_source, solution_str, ground_truth, extra_info):
    data = solution_str.encode()
    for _ in range(extra_info["rounds"]):
        data = hashlib.sha256(data * 64).digest()
    return data[0] / 255
"""


def bare(job: tuple[str, int]) -> float:
    """Compute the function in ``SOURCE`` directly."""
    data = job[0].encode()
    for _ in range(job[1]):
        data = hashlib.sha256(data * 64).digest()
    return data[0] / 255


def rounds_for(milliseconds: float) -> int:
    """Return the number of hash rounds that take ``milliseconds``."""
    most = []
    for _ in range(5):
        started = time.process_time()
        bare(("x" * 32, 2000))
        most.append((time.process_time() - started) / 2000)
    return max(int(milliseconds / 1000 / min(most)), 1)


def measure(work: Callable[[], list[float]], cpu: Callable[[], float]) -> tuple[list[float], float, float]:
    """Return values, wall seconds, and CPU seconds as counted by ``cpu``."""
    wall, used = time.perf_counter(), cpu()
    values = work()
    return values, time.perf_counter() - wall, cpu() - used


def processor_seconds(pids: list[int]) -> Callable[[], float]:
    """Return the CPU seconds of this process and of ``pids``."""
    tick = os.sysconf("SC_CLK_TCK")

    def count() -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        total = own.ru_utime + own.ru_stime
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / tick
        return total

    return count


def compare(milliseconds: float, items: int, workers: int, turns: int, folder: Path) -> dict[str, Any]:
    """Compare the pool with bare processes for one duration of the function."""
    from rlhf_mcore.config.schema import RewardConfig
    from rlhf_mcore.coroutines import run
    from rlhf_mcore.rewards.function import build_function_reward
    from rlhf_mcore.rewards.reward import make_text_trajectory
    from rlhf_mcore.types import Prompt

    rounds = rounds_for(milliseconds)
    texts = [f"response {number}" * 4 for number in range(items)]
    rows = [
        make_text_trajectory(Prompt(str(n), n, [1], "", ground_truth="42", extra_info={"rounds": rounds}), text)
        for n, text in enumerate(texts)
    ]
    (folder / "grade.py").write_text(SOURCE, encoding="utf-8")
    reward = build_function_reward(RewardConfig(function=f"{folder}/grade.py:grade", workers=workers))
    run(reward.score(rows[: 4 * workers * 32]))  # starts all workers
    ours = processor_seconds([int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_worker(path)])
    turns_made: list[dict[str, float]] = []
    with multiprocessing.get_context("fork").Pool(workers, os.setsid) as pool:
        theirs = processor_seconds([process.pid for process in multiprocessing.active_children() if process.pid])
        pool.map(bare, [("x", 1)] * workers)
        for turn in range(turns):
            sides = {
                "bare": lambda: measure(
                    lambda: pool.map(bare, [(text, rounds) for text in texts], chunksize=4), theirs
                ),
                "pool": lambda: measure(lambda: [score.value for score in run(reward.score(rows))], ours),
            }
            found = {name: sides[name]() for name in (sides if turn % 2 else reversed(sides))}
            assert found["bare"][0] == found["pool"][0]
            turns_made.append(
                {f"{name}_{what}": found[name][k] for name in sides for k, what in ((1, "wall_s"), (2, "cpu_s"))}
            )
    reward.close()
    return {
        "milliseconds": milliseconds,
        "items": items,
        "wall_ratio": statistics.median(turn["bare_wall_s"] / turn["pool_wall_s"] for turn in turns_made),
        "cpu_ratio": statistics.median(turn["bare_cpu_s"] / turn["pool_cpu_s"] for turn in turns_made),
        "turns": turns_made,
    }


def _is_worker(path: Path) -> bool:
    try:
        status = (path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return int(status[1]) == os.getpid() and b"rewards.worker" in (path / "cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    from benchmarks.common import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer items and turns")
    args = parser.parse_args()
    items, turns = (64, 3) if args.quick else (256, 5)
    workers = len(os.sched_getaffinity(0))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for milliseconds in (5.0, 20.0):
            found.append(compare(milliseconds, max(int(items * 5 / milliseconds), 64), workers, turns, Path(folder)))
            shown = {name: found[-1][name] for name in ("milliseconds", "wall_ratio", "cpu_ratio")}
            print(json.dumps(shown), flush=True)
    ratio = min(size["wall_ratio"] for size in found)
    report("reward_pool", {"workers": workers, "sizes": found}, ratio=ratio, goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
