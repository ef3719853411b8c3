"""Profile some steps: torch operations and our phases, of all ranks on one timeline.

The timeline is in the Trace Event Format (Perfetto at ui.perfetto.dev, chrome://tracing).
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 9
_PIDS_PER_RANK = 64  # per trace: the process and each of its devices


@dataclass(slots=True)
class StepProfiler:
    """Profiles steps. Consecutive steps share one timeline, ``<directory>/steps-<first>-<last>.json.gz``.

    Every rank creates a profiler with the same steps and the same shared directory. Calls are collective.
    """

    steps: Sequence[int]
    directory: Path
    name: str  # display name of this rank
    note: Callable[[str], None]
    _torch: profile | None = field(default=None, init=False)
    _first: int = field(default=0, init=False)
    _last: int = field(default=0, init=False)
    _ahead_ns: list[int] = field(default_factory=list, init=False)

    def begin(self, step: int) -> None:
        """Start profiling if ``step`` is in ``steps``."""
        if step not in self.steps:
            return
        self._last = step
        if self._torch is None:
            self._first, self._ahead_ns = step, _clocks()
            has_cuda = torch.cuda.is_available()
            self._torch = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * has_cuda)
            self._torch.start()

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a context that labels its operations with ``name`` on the timeline."""
        return record_function(name) if self._torch is not None else nullcontext()

    def end(self, *, is_last: bool = False) -> None:
        """End the profile if the next step is not profiled. ``is_last``: this step is the run's last; always end the profile."""
        if self._torch is None or (self._last + 1 in self.steps and not is_last):
            return
        running, self._torch = self._torch, None
        running.stop()
        rank, span = dist.get_rank(), f"steps-{self._first}-{self._last}"
        mine = self.directory / f".{span}.rank-{rank}.json"

        def write() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(mine))

        on_every_rank(write)
        names = all_gather_json(self.name)
        if rank == 0:
            parts = [self.directory / f".{span}.rank-{number}.json" for number in range(len(names))]
            present = [place for place, part in enumerate(parts) if part.is_file()]  # nodes may have separate disks
            target = self.directory / f"{span}.json.gz"
            merge_traces([RankTrace(parts[k], names[k], self._ahead_ns[k]) for k in present], target)
            absent = (
                ""
                if len(present) == len(parts)
                else f" (of {len(present)} of {len(parts)} ranks: others write elsewhere)"
            )
            self.note(f"profile of steps {self._first} to {self._last}: {target}{absent}; open it in ui.perfetto.dev")
        dist.barrier()
        mine.unlink(missing_ok=True)


def _clocks() -> list[int]:
    """Return the nanoseconds by which each rank's clock is ahead of the first rank's clock. Collective.

    Ranks on the same machine share a clock, so their offset is 0. Ranks leave a barrier at nearly the same time. The error of the
    median over several barriers is therefore less than the duration of one barrier.
    """
    readings = []
    for _ in range(_ROUNDS):
        dist.barrier()
        readings.append(time.time_ns())
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else ""
    gathered = all_gather_json([boot, readings])
    (first_boot, first), ahead = gathered[0], []
    for theirs, read in gathered:
        is_same = theirs == first_boot != ""
        ahead.append(0 if is_same else int(statistics.median(b - a for a, b in zip(first, read, strict=True))))
    return ahead


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
