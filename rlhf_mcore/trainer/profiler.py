"""Profile some steps: torch operations and our phases, of all ranks on one timeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from rlhf_mcore.observability.timeline import RankTrace, merge_traces
from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 9


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
