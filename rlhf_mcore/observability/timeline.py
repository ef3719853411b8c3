"""One timeline of many ranks' traces, in the Trace Event Format that Perfetto (ui.perfetto.dev) and chrome://tracing read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PIDS_PER_RANK = 64  # of a trace: the process itself, and each of its devices


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace that one rank has written, and how its clock compares with the first rank's."""

    path: Path
    name: str  # as it is shown: "rank 3 (critic)"
    ahead_ns: int = 0  # of the first rank's clock


def merge_traces(traces: Sequence[RankTrace], target: Path) -> None:
    """Write all ranks' events, one below the other on the first one's clock, as gzipped JSON. Traces are read one at a time.

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
    """Events with process ids and flow ids of their own, under the rank's name."""
    pids: dict[Any, int] = {}
    for event in events:
        source = event.get("pid")
        if not isinstance(source, int):
            continue  # marks of the profiler itself
        pid = number * _PIDS_PER_RANK + pids.setdefault(source, len(pids))
        event_of_rank = {**event, "pid": pid}
        if "ts" in event:
            event_of_rank["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event_of_rank["id"] = f"{number}:{event['id']}"  # of an arrow between two events
        if event.get("ph") == "M" and event["name"] == "process_name":
            shown = event["args"]["name"]
            event_of_rank["args"] = {"name": trace.name if shown.startswith("python") else f"{trace.name}: {shown}"}
        if event.get("ph") == "M" and event["name"] == "process_sort_index":
            event_of_rank["args"] = {"sort_index": pid}
        yield event_of_rank
