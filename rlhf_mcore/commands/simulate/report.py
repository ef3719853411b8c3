"""A comparison of schedules as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.table import Table

from rlhf_mcore.commands.simulate.compare import Comparison, Row
from rlhf_mcore.commands.simulate.schedule import Schedule

WIDTH = 150  # of a terminal; a narrower one breaks lines
_COLUMNS = (
    "devices",
    "step",
    "samples/s",
    "speedup",
    "engines\nbusy",
    "trainer\nbusy",
    "running\non each",
    "staleness\nmean / max",
    "tokens of\na response",
    "too\nold",
    "of\nbound",
)


def tables(comparison: Comparison, own: Schedule) -> Iterator[Table | str]:
    """What is printed. ``own``: the configuration's schedule, which is marked."""
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
        table.add_row(row.schedule.name + mark, *_cells(row, first))
    yield table
    if any(row.schedule == own for row in comparison.rows):
        yield "* the configuration's own"
    if comparison.left_out:
        yield f"not shown, for engines and trainer cannot divide the devices (--devices): {'; '.join(comparison.left_out)}"
    if any(len(rows) > 1 for rows in comparison.tried.values()):
        yield _by_split(comparison)


def _cells(row: Row, first: float) -> tuple[str, ...]:
    outcome, split = row.outcome, row.split
    return (
        str(split.devices) if split.colocated else f"{split.rollout} + {split.training}",
        f"{outcome.step_s:.3g} s",
        f"{outcome.samples_per_s:.4g}",
        f"{outcome.tokens_per_s / first:.2f}",
        f"{outcome.rollout_busy:.0%}",
        f"{outcome.training_busy:.0%}",
        f"{outcome.running:.0f}",
        f"{outcome.staleness_mean:.2f} / {outcome.staleness_max}",
        f"{outcome.length_mean:.4g}",
        f"{outcome.redrawn:.1%}",
        f"{outcome.samples_per_s / row.bound:.0%}",
    )


def _by_split(comparison: Comparison) -> Table:
    """Samples/s of every split that was simulated."""
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
        table.add_row(f"{split.rollout} + {split.training}", *cells)
    return table
