#!/usr/bin/env python
"""Kill a run at random times, start the same command again until it ends, and compare it with an undisturbed run.

    python tools/chaos.py CONFIG.yaml [a.b=c ...] --kills 20

Both runs write to the configuration's output directory, as the experiments ``<experiment>-calm`` and ``<experiment>-chaos``. The
script compares the metrics of every step and all files in the last checkpoint, bit for bit, except times. It prints the differences,
and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rlhf_mcore.checkpoint.layout import ROLLOUTS, scan
from rlhf_mcore.checkpoint.manifest import read_manifest, verify
from rlhf_mcore.config.load import load_config

# Files and metrics that differ between equal runs, such as names and times.
UNEQUAL_FILES = ("config.yaml", "trainer_state.json")
UNEQUAL_METRICS = ("timing/", "throughput/", "rollout/in_flight")


@dataclass(frozen=True, slots=True)
class Run:
    """A training command and its run directory."""

    command: list[str]
    directory: Path

    def finish(self) -> float:
        """Run to the end. Returns the elapsed seconds.

        Raises:
            subprocess.CalledProcessError: the run failed.
        """
        started = time.monotonic()
        subprocess.run(self.command, check=True)
        return time.monotonic() - started

    def is_killed_after(self, seconds: float, after_save: bool = False) -> bool:
        """Start the run, and kill all its processes after a time. Returns False if the run finished before.

        Args:
            seconds: time until the kill.
            after_save: count the time from the first checkpoint of this start, instead of from the start.

        Raises:
            subprocess.CalledProcessError: the run failed before it was killed.
        """
        before = self.last_step()
        process = subprocess.Popen(self.command, start_new_session=True)
        while after_save and process.poll() is None and self.last_step() == before:
            time.sleep(0.02)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
            return True
        if code != 0:
            raise subprocess.CalledProcessError(code, self.command)
        return False

    def last_step(self) -> int:
        """Return the step of the newest checkpoint, or -1 if there is none."""
        return max((checkpoint.step for checkpoint in scan(self.directory)), default=-1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, kill and compare as described above. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", metavar="a.b=c", nargs="*")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of kills")
    parser.add_argument("--earliest", type=float, default=0.0, help="earliest kill, in seconds after a start")
    parser.add_argument(
        "--latest", type=float, help="latest kill, in seconds after a start (default: duration of the calm run)"
    )
    parser.add_argument(
        "--after-save",
        nargs="?",
        const="all",
        choices=("all", "half"),
        help="count these seconds from the first checkpoint of a start; half: only for every second start, so that kills happen "
        "in all phases, even if starts are slow on this machine",
    )
    args = parser.parse_intermixed_args(argv)
    calm, chaos = (make_run(args.config, args.overrides, kind) for kind in ("calm", "chaos"))
    seconds = calm.finish()
    print(f"chaos: left alone, the run took {seconds:.1f} s", flush=True)
    latest = seconds if args.latest is None else args.latest
    instants = random.Random(args.seed)
    seconds_of_kills = [instants.uniform(args.earliest, max(latest, args.earliest)) for _ in range(args.kills)]
    after_save = [args.after_save == "all" or (args.after_save == "half" and n % 2 == 1) for n in range(args.kills)]
    kills = torment(chaos, seconds_of_kills, after_save)
    differing = differences(calm.directory, chaos.directory)
    for line in differing[:50]:
        print(f"chaos: {line}")
    print(f"chaos: {kills} kills, {len(differing)} differences")
    return 1 if differing else 0


def make_run(config: str, overrides: Sequence[str], kind: str) -> Run:
    """Return the run of a kind (calm or chaos), whose directory must not exist yet."""
    cfg = load_config(config, overrides)
    experiment = f"{cfg.experiment}-{kind}"
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *overrides, f"experiment={experiment}"]
    directory = Path(cfg.output_dir) / cfg.project / experiment
    if directory.exists():
        raise SystemExit(f"chaos: {directory} exists; remove it, or choose another experiment")
    return Run(command, directory)


def torment(run: Run, instants: Sequence[float], after_save: Sequence[bool]) -> int:
    """Kill a run once per instant, then let it finish. Returns the number of kills.

    An instant is in seconds after a start, or after the first save of the start if ``after_save`` is True.
    """
    for number, (after, is_after_save) in enumerate(zip(instants, after_save, strict=True)):
        if not run.is_killed_after(after, is_after_save):
            return number
        print(f"chaos: kill {number + 1} after {after:.2f} s; newest checkpoint: {run.last_step()}", flush=True)
    run.finish()
    return len(instants)


def kill_tree(root: int) -> None:
    """Send SIGKILL to a process and all its descendants, in any session."""
    doomed = [root]
    for pid in doomed:
        os.kill(pid, signal.SIGSTOP)  # so that it starts no further processes
        doomed += children(pid)
    for pid in reversed(doomed):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the children of a process from /proc."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for path in lists for child in path.read_text().split()]


def differences(calm: Path, chaos: Path) -> list[str]:
    """Return one line per difference between two run directories."""
    return [*metric_differences(read_metrics(calm), read_metrics(chaos)), *checkpoint_differences(calm, chaos)]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the records of a run without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(UNEQUAL_METRICS)} for line in lines]


def metric_differences(calm: Sequence[dict[str, Any]], chaos: Sequence[dict[str, Any]]) -> list[str]:
    steps = [[record["step"] for record in records] for records in (calm, chaos)]
    if steps[0] != steps[1]:
        return [f"metrics of steps {steps[0]} against {steps[1]}"]
    return [
        f"step {a['step']}: {name} is {a.get(name)} against {b.get(name)}"
        for a, b in zip(calm, chaos, strict=True)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def checkpoint_differences(calm: Path, chaos: Path) -> list[str]:
    """Compare the last checkpoints by the verified hashes in their manifests."""
    last = [scan(run)[-1].path for run in (calm, chaos)]
    damage = [f"{path}: {problem}" for path in last for problem in verify(path)]
    files = [read_manifest(path).files for path in last]
    names = sorted((files[0].keys() | files[1].keys()).difference(UNEQUAL_FILES))
    differing = [name for name in names if files[0].get(name) != files[1].get(name)]
    if ROLLOUTS in differing and all(ROLLOUTS in own for own in files):
        calm_rollouts, chaos_rollouts = (read_rollouts(path / ROLLOUTS) for path in last)
        if calm_rollouts == chaos_rollouts:
            differing.remove(ROLLOUTS)
    return damage + [f"{last[0].name} against {last[1].name}: {name} differs" for name in differing]


def read_rollouts(path: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Read the responses that wait for training: their records without the times of episodes, and their tensors."""
    with safe_open(path, "numpy") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).tobytes() for name in names}
        records = json.loads(file.metadata()["records"])
    return [{name: value for name, value in record.items() if name != "record"} for record in records], tensors


if __name__ == "__main__":
    sys.exit(main())
