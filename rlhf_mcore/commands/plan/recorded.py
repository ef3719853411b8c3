"""``rlhf-mcore plan --run DIR``: compare the memory that a run has recorded with its prediction, phase by phase."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import METRICS
from rlhf_mcore.planning.inputs import Assumptions, GpuType, PlanInputs, plan_inputs
from rlhf_mcore.planning.phases import GENERATE, STATE, SYNC, PhaseMemory, phases
from rlhf_mcore.planning.plan import with_offload
from rlhf_mcore.planning.report import size_text, table

ALLOCATED, OUTSIDE, MOVABLE = "allocated", "outside", "movable"
_METRIC = re.compile(f"memory/(.+?)(?:_({ALLOCATED}|{OUTSIDE}))?_bytes")
# Recorded phases, and the planned phases that they contain. Several models are updated one after another.
_PLANNED = {
    GENERATE: (GENERATE,),
    "score": ("reward forward",),
    "reference": ("reference forward",),
    "values": ("critic forward",),
    "old_logprobs": ("actor forward",),
    "update": ("actor update", "critic update"),
    SYNC: (SYNC,),
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """Predicted and recorded bytes of the first rank in a phase.

    ``kind``: ``allocated`` is everything that torch allocates. ``movable`` is the offloaded parts, for runs without a GPU.
    """

    phase: str
    kind: str
    predicted: int
    recorded: int


def read_peaks(directory: Path) -> dict[str, dict[str, int]]:
    """Return the largest recorded bytes of a run, by kind and by phase.

    Raises:
        ConfigError: the run has recorded none.
    """
    remedy = "name the directory of a run on GPUs, or of a run that offloads models"
    peaks: dict[str, dict[str, int]] = {ALLOCATED: {}, OUTSIDE: {}, MOVABLE: {}}
    for record in read_lines(directory / METRICS, remedy, is_growing=True):
        for name in record:
            if (found := _METRIC.fullmatch(name)) is not None:
                of_kind = peaks[found[2] or MOVABLE]
                of_kind[found[1]] = max(of_kind.get(found[1], 0), int(record.number(name, minimum=0)))
    if not any(peaks.values()):
        raise ConfigError(f"--run {directory}: {METRICS} contains no memory/<phase>_*bytes; {remedy}")
    return peaks


def compare_with_record(
    cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions, peaks: Mapping[str, Mapping[str, int]]
) -> list[Recorded]:
    """Return each phase of the first rank for which the run has recorded memory, and the plan has a prediction."""
    inputs = plan_inputs(with_offload(cfg, world_size, gpu, assumed), world_size, gpu, assumed)
    planned = {phase.phase: phase for phase in phases(inputs, ranks=(0,)) if phase.rank == 0}
    kind = ALLOCATED if peaks[ALLOCATED] else MOVABLE
    return [
        Recorded(name, kind, max(_sum_counted(inputs, phase, kind) for phase in contained), peaks[kind][name])
        for name, names in _PLANNED.items()
        if (contained := [planned[each] for each in names if each in planned]) and peaks[kind].get(name)
    ]


def _sum_counted(inputs: PlanInputs, phase: PhaseMemory, kind: str) -> int:
    """Sum the parts that a metric counts. On a CPU, an engine's memory is unknown to the record."""
    offloaded = {f"{role.name} {name}" for role in inputs.roles for name, part in STATE if part in role.offload}
    return sum(
        size for name, size in phase.parts.items() if (name in offloaded if kind == MOVABLE else name != "reserve")
    )


def comparison_lines(directory: Path, rows: Sequence[Recorded], outside: Mapping[str, int]) -> Iterator[str]:
    """Yield a table of the comparison, for a terminal."""
    cells = [
        (
            row.phase,
            row.kind,
            size_text(row.predicted),
            size_text(row.recorded),
            f"{row.recorded / max(row.predicted, 1) - 1:+.1%}",
            size_text(outside[row.phase]) if row.phase in outside else "-",
        )
        for row in rows
    ]
    header = ("first rank", "bytes", "planned", "recorded", "difference", "outside torch")
    yield f"\nmemory that {directory} has recorded:"
    yield from table(header, cells)
