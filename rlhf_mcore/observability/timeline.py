"""Merge the traces of many ranks into one timeline, in the Trace Event Format (Perfetto at ui.perfetto.dev, chrome://tracing)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIDS_PER_RANK = 64  # per trace: the process and each of its devices


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank, and the offset of its clock from the first rank's clock."""

    path: Path
    name: str  # displayed name, such as "rank 3 (critic)"
    ahead_ns: int = 0  # positive: this clock is ahead of the first rank's clock


def merge_traces(traces: Sequence[RankTrace], target: Path) -> None:
    """Write the events of all ranks on the first rank's clock, as gzipped JSON. One trace is in memory at a time.

    Times are microseconds since the first event of the first trace.
    """
    origin_us: float | None = None
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for number, trace in enumerate(traces):
            content = json.loads(trace.path.read_text(encoding="utf-8"))
            clock_us = (content.get("baseTimeNanoseconds", 0) - trace.ahead_ns) / 1000
            events = content["traceEvents"]
            if origin_us is None:
                origin_us = clock_us + min((event["ts"] for event in events if event.get("ph") == "X"), default=0.0)
            for event in _of_rank(events, trace, number, clock_us - origin_us):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _of_rank(
    events: Sequence[dict[str, Any]], trace: RankTrace, number: int, shift_us: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank with unique process ids and flow ids, under the rank's name."""
    pids: dict[Any, int] = {}
    for event in events:
        source = event.get("pid")
        if not isinstance(source, int):
            continue  # the profiler's own marks
        pid = number * _PIDS_PER_RANK + pids.setdefault(source, len(pids))
        event_of_rank = {**event, "pid": pid}
        if "ts" in event:
            event_of_rank["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event_of_rank["id"] = f"{number}:{event['id']}"  # id of an arrow between two events
        if event.get("ph") == "M" and event["name"] == "process_name":
            shown = event["args"]["name"]
            event_of_rank["args"] = {"name": trace.name if shown.startswith("python") else f"{trace.name}: {shown}"}
        if event.get("ph") == "M" and event["name"] == "process_sort_index":
            event_of_rank["args"] = {"sort_index": pid}
        yield event_of_rank
