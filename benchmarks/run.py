"""Run benchmarks one after the other, each in a separate process, and print a table of ratios, goals and verdicts.

    python -m benchmarks.run [--quick] [NAME...]      run the named benchmarks, or all, and print the table.
    python -m benchmarks.run --write                  write the committed results and their plot into benchmarks/results/README.md.

The module docstring of a benchmark describes the measurement. Its details are in benchmarks/results/<name>.json. Quick runs do not
change these files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLOT = RESULTS / "README.md", RESULTS / "benchmarks.svg"
BEGIN, END = "<!-- benchmarks.run: begin -->\n", "<!-- benchmarks.run: end -->\n"
LAST_LINE = re.compile(r"^(\w+)(?: \w+)? (\S+) goal (\S+)$")


@dataclass(frozen=True, slots=True)
class Row:
    """A benchmark. ``at_least``: the goal is a lower bound, otherwise an upper bound."""

    name: str
    what: str
    at_least: bool = False
    needs: str = ""  # an argument or a previous command without which it cannot measure its ratio
    package: str = "benchmarks"

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name}"


SIMULATE = "rlhf_mcore_contrib.simulate.benchmarks"
ROWS = (
    Row("vs_trl", "a step by TRL's, wall", needs="launch/setup.sh --with bench"),
    Row("step_overhead", "a step by its parts alone"),
    Row("packing", "useful tokens/s, packed by padded, times the padded fill", at_least=True),
    Row("prefixes", "speed-up by shared prefixes by its goals, the smallest", at_least=True),
    Row("balance", "fill of microbatches", at_least=True),
    Row("exchange", "moving rows between 4 ranks by an earlier release's", needs="--against"),
    Row("scaling", "control per row at 16 times the rows by that at 1"),
    Row("bridge_sync", "weight sync by the engine's own reload from memory"),
    Row("sync_checks", "digests of a sync by a step of the run"),
    Row("bridge_bytes", "bytes sent by the lower bound"),
    Row("bridge_plan", "seconds to plan a sync of 16,384 ranks"),
    Row("suggest", "CPU seconds of plan --suggest, of 30B-A3B and of 671B, by their goals, the larger"),
    Row("bridge_remote", "sync to an engine of its own by a plain copy"),
    Row("convert", "peak memory of a conversion by its limit"),
    Row("save_stall", "training's wait for a save in the background by one in the foreground"),
    Row("save_speed", "GB/s of a checkpoint by write and fsync", at_least=True),
    Row("export", "GB/s of an export by safetensors' save_file", at_least=True),
    Row("published", "bytes read by bytes needed, of quantised files"),
    Row("reshard_load", "resume on another layout by the same"),
    Row("load", "loading on 4 ranks from slow storage by one sequential reader"),
    Row("resume_check", "bytes that a rank reads to check a checkpoint by its part and one file"),
    Row("reward_pool", "items/s of the reward pool by the bare grader", at_least=True),
    Row("pipelined", "simulated samples/s by the bound", at_least=True, package=SIMULATE),
    Row("asynchronous", "samples/s with staleness 4 by synchronous", at_least=True),
    Row("simulated", "distance of simulated from measured samples/s and tokens/s, the largest", package=SIMULATE),
    Row("ready", "time to the first step by the longer start of trainer and engine alone"),
    Row("device_counts", "host syncs in the passes of a small update, all cases together, on fake CUDA tensors"),
    Row(
        "exact_logprobs",
        "share of equal logprobs in engine and trainer with shared operations",
        at_least=True,
    ),
    Row("selected_keys", "share of equal keys that indexers select in bf16 and in fp8", at_least=True),
    Row("leak", "growth of resident memory, in % a step"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a benchmark. ``ratio`` is None if there was no last line; ``verdict`` contains the reason."""

    row: Row
    ratio: float | None
    goal: float | None
    verdict: str
    seconds: float | None = None
    cpu_s: float | None = None


def judge(row: Row, ratio: float, goal: float) -> str:
    """Return "met" or "missed"."""
    if ratio != ratio:
        return f"not compared: needs {row.needs}" if row.needs else "not compared"
    return "met" if (ratio >= goal if row.at_least else ratio <= goal) else "missed"


def run(row: Row, quick: bool, timeout_s: float) -> Outcome:
    """Run one benchmark and read its last line."""
    if find_spec(row.module) is None:
        return Outcome(row, None, None, "not there yet")
    command = [sys.executable, "-m", row.module, *(["--quick"] if quick else [])]
    begun, before, pipe = time.perf_counter(), os.times(), subprocess.PIPE
    # A separate session, so that its ranks and engines end with it.
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome(row, None, None, f"stopped after {timeout_s:.0f} s", timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds, after = time.perf_counter() - begun, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    for line in reversed(output.splitlines()):
        if process.returncode == 0 and (found := LAST_LINE.match(line)):
            ratio, goal = float(found[2]), float(found[3])
            return Outcome(row, ratio, goal, judge(row, ratio, goal), seconds, cpu_s)
    cause = (errors.strip() or output.strip() or "no output").splitlines()[-1]
    return Outcome(row, None, None, f"failed: {cause[:200]}", seconds, cpu_s)


def spent(outcome: Outcome) -> str:
    """Return wall and CPU seconds of a benchmark that ended by itself."""
    return "" if outcome.cpu_s is None else f" ({outcome.seconds:.0f} s, {outcome.cpu_s:.0f} s of CPU)"


def read_committed(row: Row) -> Outcome:
    """Return the outcome in the result file."""
    path = RESULTS / f"{row.name}.json"
    if not path.is_file():
        return Outcome(row, None, None, "not measured")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Outcome(row, found["ratio"], found["goal"], judge(row, found["ratio"], found["goal"]))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
    lines = ["| benchmark | what | measured | goal | verdict | seconds |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        row = outcome.row
        sign = "≥" if row.at_least else "≤"
        measured = "-" if outcome.ratio is None else f"{outcome.ratio:.3f}"
        goal = "-" if outcome.goal is None else f"{sign} {outcome.goal:g}"
        seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.0f}"
        lines.append(f"| {row.name} | {row.what} | {measured} | {goal} | {outcome.verdict} | {seconds} |")
    return "\n".join(lines) + "\n"


def against_trl() -> str:
    """Return the rows of vs_trl. The table of all benchmarks contains only the worst row."""
    path = RESULTS / "vs_trl.json"
    if not path.is_file():
        return ""
    lines = ["| vs_trl | wall | of the rounds | CPU | goal | a step | TRL's |", "|---|---|---|---|---|---|---|"]
    for name, found in json.loads(path.read_text(encoding="utf-8"))["rows"].items():
        wall, median = found["ratios"]["wall_s"], found["median"]
        ours, theirs = (
            statistics.median(pair[side]["wall_s"] for pair in found["pairs"]) for side in ("ours", "theirs")
        )
        lines.append(
            f"| {name} | {median['wall_s']:.3f} | {min(wall):.3f} to {max(wall):.3f} | {median['cpu_s']:.3f} "
            f"| ≤ {found['row']['goal']:g} | {ours:.2f} s | {theirs:.2f} s |"
        )
    return "\n" + "\n".join(lines) + "\n"


def page(text: str, outcomes: Sequence[Outcome], loads: Sequence[float]) -> str:
    """Return the page with a new generated part, which is appended if the page has none."""
    load = f" Load average of the machine: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    made = (
        f"{BEGIN}\n## All benchmarks\n\n`python -m benchmarks.run --write` writes this section.{load}\n\n"
        f"![measured by goal]({PLOT.name})\n\n{table(outcomes)}{against_trl()}\n{END}"
    )
    head, found, rest = text.partition(BEGIN)
    return head + made + rest.partition(END)[2] if found else f"{text.rstrip()}\n\n{made}"


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot the ratio of each benchmark to its goal. 1 is the goal, and bars longer than 1 miss it."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot

    known = [o for o in outcomes if o.ratio is not None and o.goal and o.ratio == o.ratio]
    by_goal = [(o.goal / o.ratio if o.row.at_least else o.ratio / o.goal) for o in known]  # type: ignore[operator]
    figure, axes = pyplot.subplots(figsize=(7, 0.3 * len(known) + 1))
    axes.barh([o.row.name for o in known], by_goal, color=["#4a7" if part <= 1 else "#c65" for part in by_goal])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("measured by goal (1: the goal, shorter is better)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds; results are not kept")
    parser.add_argument("--write", action="store_true", help="run nothing; write README.md of the committed results")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="of each benchmark (default: 1800)")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.names) - {row.name for row in ROWS}):
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(row.name for row in ROWS)}")
    rows = [row for row in ROWS if not args.names or row.name in args.names]
    if args.write:
        outcomes = [read_committed(row) for row in ROWS]
        files = [RESULTS / f"{row.name}.json" for row in ROWS]
        loads = [json.loads(file.read_text())["machine"]["load_1min"] for file in files if file.is_file()]
        plot(outcomes, PLOT)
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), outcomes, loads), encoding="utf-8")
        print(table(outcomes), end="")
        return 0
    outcomes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for row in rows:
            outcomes.append(run(row, args.quick, args.timeout))
            print(f"{row.name}: {outcomes[-1].verdict}{spent(outcomes[-1])}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return 130
    finally:  # also prints the results so far if another time limit ends this process
        print(table(outcomes), end="", flush=True)
    return 1 if any(outcome.verdict.startswith(("failed", "stopped")) for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
