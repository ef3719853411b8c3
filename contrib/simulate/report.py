"""Write a comparison of schedules as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.box import SIMPLE
from rich.table import Table

from rlhf_mcore_contrib.simulate.compare import ScheduleComparison, ScheduleRow
from rlhf_mcore_contrib.simulate.schedule import StepSchedule
from rlhf_mcore_contrib.simulate.times import Split

WIDTH = 150  # columns of the terminal; a narrower terminal wraps lines
# Column title -> function that returns the cell, given a row and the tokens/s of the first row.
_COLUMNS: dict[str, Callable[[ScheduleRow, float], str]] = {
    "devices": lambda row, _: str(row.split.devices) if row.split.colocated else _describe_split(row.split),
    "step": lambda row, _: f"{row.outcome.step_s:.3g} s",
    "samples/s": lambda row, _: f"{row.outcome.samples_per_s:.4g}",
    "speedup": lambda row, first: f"{row.outcome.tokens_per_s / first:.2f}",
    "engines\nbusy": lambda row, _: f"{row.outcome.rollout_busy:.0%}",
    "trainer\nbusy": lambda row, _: f"{row.outcome.training_busy:.0%}",
    "running\non each": lambda row, _: f"{row.outcome.running:.0f}",
    "staleness\nmean / max": lambda row, _: f"{row.outcome.staleness_mean:.2f} / {row.outcome.staleness_max}",
    "tokens of\na response": lambda row, _: f"{row.outcome.length_mean:.4g}",
    "too\nold": lambda row, _: f"{row.outcome.redrawn:.1%}",
    "of\nbound": lambda row, _: f"{row.outcome.samples_per_s / row.bound:.0%}",
}


def tables(comparison: ScheduleComparison, own: StepSchedule) -> Iterator[Table | str]:
    """Yield the lines and tables to print. ``own``: the configuration's schedule, which gets a mark."""
    lengths = comparison.lengths
    cut = f", {lengths.cut:.1%} of them as long as the limit" if lengths.cut else ""
    yield f"lengths  {lengths.name}: {lengths.mean:.1f} tokens on average{cut}"
    yield f"times    {comparison.source}"
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    first = comparison.rows[0].outcome.tokens_per_s
    for row in comparison.rows:
        mark = " *" if row.schedule == own else ""
        table.add_row(row.schedule.name + mark, *(cell(row, first) for cell in _COLUMNS.values()))
    yield table
    if any(row.schedule == own for row in comparison.rows):
        yield "* schedule of the configuration"
    if comparison.left_out:
        yield f"not shown, because engines and trainer cannot divide the devices (--devices): {'; '.join(comparison.left_out)}"
    if any(len(rows) > 1 for rows in comparison.tried.values()):
        yield _by_split(comparison)


def _describe_split(split: Split) -> str:
    return f"{split.rollout} + {split.training}"


def _by_split(comparison: ScheduleComparison) -> Table:
    """List the samples/s of every simulated split."""
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        title="samples/s by devices of engines + trainer",
        title_justify="left",
        title_style="",
    )
    apart = {name: rows for name, rows in comparison.tried.items() if not rows[0].split.colocated}
    table.add_column("devices", justify="right")
    for name in apart:
        table.add_column(name, justify="right")
    by_name = {name: {row.split: row.outcome.samples_per_s for row in rows} for name, rows in apart.items()}
    for split in sorted({split for rows in by_name.values() for split in rows}, key=lambda split: split.rollout):
        cells = [f"{rows[split]:.4g}" if split in rows else "" for rows in by_name.values()]
        table.add_row(_describe_split(split), *cells)
    return table
