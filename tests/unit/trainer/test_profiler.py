"""Traces of ranks become one timeline: below each other, on one clock, each under its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from rlhf_mcore.trainer.profiler import RankTrace, StepProfiler, merge_traces
from tests.unit.parallel.world import world

__all__ = ["world"]
SECOND = 10**9


def trace(path: Path, base_ns: int, at_us: float) -> Path:
    """A rank's trace as torch writes it: two processes, an operator, an arrow to the device, marks."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": at_us, "pid": 4711, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "ts": at_us, "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
        {"ph": "X", "name": "aten::mm", "pid": 4711, "tid": 5, "ts": at_us, "dur": 2.5},
        {"ph": "s", "id": 9, "name": "launch", "pid": 4711, "tid": 5, "ts": at_us + 1},
        {"ph": "f", "id": 9, "name": "launch", "pid": 0, "tid": 7, "ts": at_us + 2},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": at_us + 9},
    ]
    path.write_text(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}))
    return path


def test_ranks_are_on_the_first_ones_clock_with_names_and_ids_of_their_own(tmp_path: Path) -> None:
    traces = [
        RankTrace(trace(tmp_path / "a", 100 * SECOND, 40.0), "rank 0 (actor)"),
        # Its clock is 3 s ahead, it has another base, and it began its operator 8 us later.
        RankTrace(trace(tmp_path / "b", 101 * SECOND, 2_000_048.0), "rank 1 (critic)", ahead_ns=3 * SECOND),
    ]
    merge_traces(traces, target := tmp_path / "all.json.gz")
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    begun = [(event["pid"], event["ts"], event["dur"]) for event in events if event["name"] == "aten::mm"]
    assert begun == [(0, 0.0, 2.5), (64, 8.0, 2.5)]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "rank 0 (actor)",
        1: "rank 0 (actor): GPU 0",
        64: "rank 1 (critic)",
        65: "rank 1 (critic): GPU 0",
    }
    arrows = [(event["id"], event["ph"]) for event in events if "id" in event]
    assert arrows == [("0:9", "s"), ("0:9", "f"), ("1:9", "s"), ("1:9", "f")]
    assert len(events) == 10


def test_each_profiled_step_has_a_file_in_the_directory(world: None, tmp_path: Path) -> None:
    notes: list[str] = []
    profiler = StepProfiler([1, 3], tmp_path / "profile", "rank 0", notes.append)
    for step in range(1, 5):
        profiler.begin(step)
        profiler.end(is_last=step == 4)
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == ["steps-1-1.json.gz", "steps-3-3.json.gz"]
    assert len(notes) == 2
