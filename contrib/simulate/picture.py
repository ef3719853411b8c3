"""Plot a comparison of schedules as a PNG. Only this module needs matplotlib, which is an extra."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore_contrib.simulate.compare import ScheduleComparison, ScheduleRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEPS = 4  # steps of the slowest schedule in the picture; the others cover the same time
_GENERATE, _TRAIN, _SYNC = "#4477aa", "#ee8866", "#222222"


def check_can_draw() -> None:
    """Check that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib, which is not installed; pip install matplotlib, or omit --png"
        ) from error


def draw(comparison: ScheduleComparison) -> bytes:
    """Plot a comparison as a PNG: activity of engines and trainer over some steps, rates for each split, and staleness."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = comparison.rows
    colors = {row.schedule.name: f"C{place}" for place, row in enumerate(rows)}
    figure = Figure(figsize=(11, 1.1 * len(rows) + 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    lanes = figure.add_gridspec(len(rows) + 1, 2, height_ratios=[1.0] * len(rows) + [2.6])
    recorded = min(row.outcome.trace.running[-1][0] - row.outcome.trace.begin for row in rows)
    seconds = min(recorded, _STEPS * max(row.outcome.step_s for row in rows))
    traces = [row.outcome.trace for row in rows]
    shown = [[(at - t.begin, running) for at, running in t.running if 0 <= at - t.begin <= seconds] for t in traces]
    most = max(running for points in shown for _, running in points)
    for place, (row, points) in enumerate(zip(rows, shown, strict=True)):
        axes = figure.add_subplot(lanes[place, :])
        _lane(axes, row, points, seconds, most)
        axes.tick_params(labelbottom=place == len(rows) - 1)
        if place == len(rows) - 1:
            axes.set_xlabel("seconds   (blue: sequences in all engines; orange: training; black: sync)")
    _rates(figure.add_subplot(lanes[-1, 0]), comparison, colors)
    _staleness(figure.add_subplot(lanes[-1, 1]), rows, colors)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _lane(axes: Axes, row: ScheduleRow, points: list[tuple[float, int]], seconds: float, most: int) -> None:
    """Plot one schedule over time."""
    trace, begin = row.outcome.trace, row.outcome.trace.begin
    axes.fill_between([at for at, _ in points], [running for _, running in points], step="post", color=_GENERATE, lw=0)
    for spans, color in ((trace.training, _TRAIN), (trace.syncs, _SYNC)):
        bars = [(start - begin, end - start) for start, end in spans if end > begin and start < begin + seconds]
        axes.broken_barh(bars, (-0.45 * most, 0.35 * most), color=color, lw=0)
    axes.set(xlim=(0, seconds), ylim=(-0.5 * most, 1.05 * most), yticks=[0, most])
    title = f"{row.schedule.name}: {row.outcome.samples_per_s:.3g} samples/s"
    axes.set_title(title, loc="left", fontsize=9, pad=2)


def _rates(axes: Axes, comparison: ScheduleComparison, colors: Mapping[str, str]) -> None:
    """Plot the samples/s for each split, or for each schedule if every schedule has a single split."""
    axes.set_title("samples/s by devices of the engines", loc="left", fontsize=9)
    for name, rows in comparison.tried.items():
        if rows[0].split.colocated:
            axes.axhline(rows[0].outcome.samples_per_s, color=colors[name], ls="--", lw=1, label=name)
        else:
            rates = [row.outcome.samples_per_s for row in rows]
            axes.plot([row.split.rollout for row in rows], rates, marker="o", ms=4, color=colors[name], label=name)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=7)


def _staleness(axes: Axes, rows: list[ScheduleRow], colors: Mapping[str, str]) -> None:
    """Plot the share of responses for each staleness of their oldest token."""
    axes.set_title("share of responses by versions between their oldest token and the step", loc="left", fontsize=9)
    width = 0.8 / len(rows)
    for place, row in enumerate(rows):
        total = sum(row.outcome.staleness.values())
        at = [age + (place - (len(rows) - 1) / 2) * width for age in row.outcome.staleness]
        shares = [count / total for count in row.outcome.staleness.values()]
        axes.bar(at, shares, width, color=colors[row.schedule.name], label=row.schedule.name)
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=7)
