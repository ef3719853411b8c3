"""The live display of a run on a terminal: progress, time per phase, curves, a sample and the last steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, pairwise
from typing import Any

import rich.console
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf_mcore.config.errors import printable
from rlhf_mcore.observability.figures import FIGURES, Figure, figure_text, percent

RECENT_STEPS = 6
MAX_WIDTH = 110
NARROW = 70
PANEL_EDGES = 4
PHASE_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
LEGEND_SHARE = 0.01  # phases with a smaller share of the time are not named
SAMPLE_HEIGHT = 28  # minimum terminal lines to show a sample
NOT_FINITE = ("nan", "inf", "-inf")
REFRESHES_PER_SECOND = 4
BARS = "▁▂▃▄▅▆▇█"


# Metrics shown as curves: label, metric and format.
CURVES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:z.3f}".format),
    ("loss", "loss/sft", "{:.4f}".format),
    ("loss", "loss/reward_model", "{:.4f}".format),
    ("loss", "loss/dpo", "{:.4f}".format),
    ("pairs right", "preference/accuracy", "{:.3f}".format),
    ("kl", "kl/mean", "{:.4f}".format),
    ("entropy", "actor/entropy", "{:.2f}".format),
    ("length", "rollout/response_length_mean", "{:.1f}".format),
)


class LiveDisplay:
    """Displays the state of a run, in its own thread between ``start`` and ``stop``.

    ``first_step`` is the number of steps before a resume.
    """

    def __init__(
        self,
        output: rich.console.Console,
        title: str,
        total_steps: int,
        first_step: int,
        clock: Callable[[], float],
    ) -> None:
        self._output, self._title, self._total_steps, self._first_step = output, title, total_steps, first_step
        self._clock = clock
        self._live: Live | None = None
        self._started = self._phase_started = clock()
        self._phase = Spinner("dots", text="starting", style="cyan")
        self._phase_name, self._progress_text, self._request = "starting", "", ""
        # Replaced, never changed in place, because another thread renders the display.
        self._recent: tuple[tuple[int, Mapping[str, Any]], ...] = ()
        self._curves: dict[str, tuple[float, ...]] = {}  # by metric
        self._sample: tuple[int, str, str, float | None] | None = None
        self._step_seconds: tuple[float, ...] = ()

    @property
    def is_live(self) -> bool:
        """Return whether the display is active."""
        return self._live is not None

    def start(self) -> None:
        """Start the display."""
        self._started = self._phase_started = self._clock()
        self._live = Live(
            get_renderable=lambda: _CursorAtStart(self.render()),
            console=self._output,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )
        self._live.start()

    def stop(self, last_phase: str) -> None:
        """Show the final state and stop. A second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            self._phase_name, self._request = last_phase, ""
            live.stop()

    def phase(self, name: str) -> None:
        """Start a phase: generate, score, update, ..."""
        self._phase_name, self._phase_started, self._progress_text = name.replace("_", " "), self._clock(), ""

    def progress(self, text: str) -> None:
        """Show the progress within the phase."""
        self._progress_text = text

    def request(self, text: str) -> None:
        """Show that a request was received. Safe inside a signal handler."""
        self._request = text

    def sample(self, step: int, prompt: str, response: str, score: float | None) -> None:
        """Show a response of the model."""
        self._sample = step, prompt, response, score

    def step(self, step: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Show a step that took ``seconds``."""
        if step > 0:  # step 0 is the evaluation before training
            self._step_seconds = (*self._step_seconds, seconds)[-2 * RECENT_STEPS :]
        self._recent = (*self._recent, (step, dict(metrics)))[-RECENT_STEPS:]
        for _, metric, _ in CURVES:
            # Replaced as a whole, because the display reads it concurrently.
            if (value := metrics.get(metric)) is not None:
                self._curves = {**self._curves, metric: (*self._curves.get(metric, ()), float(value))}

    def render(self) -> RenderableType:
        """Render the current state of the display."""
        width = min(self._output.width, MAX_WIDTH)
        doing: RenderableType = Text(self._phase_name, style="cyan")
        if self._live is not None:
            seconds = self._clock() - self._phase_started
            far = f"  {self._progress_text}" if self._progress_text else ""
            self._phase.update(text=Text(f"{self._phase_name}  {seconds:.0f} s{far}", style="cyan"))
            doing = self._phase
        parts = [self._progress(), doing]
        if self._request:
            parts.append(Text(self._request, style="bold yellow"))
        recent, room = self._recent, width - PANEL_EDGES
        if recent:
            parts += _where_time_goes([metrics for _, metrics in recent], room)
            if curves := self._drawn_curves():
                parts += [Text(), *curves]
            if self._sample is not None and self._output.width >= NARROW and self._output.height >= SAMPLE_HEIGHT:
                parts += [Text(), *_sample_lines(self._sample, room)]
            parts += [Text(), _recent_table(recent, room)]
        return Panel(
            Group(*parts), title=Text(self._title, style="bold"), title_align="left", width=width, padding=(0, 1)
        )

    def _progress(self) -> RenderableType:
        done = self._recent[-1][0] if self._recent else self._first_step
        figures = [f"step {done}/{self._total_steps}", f"elapsed {_hours(self._clock() - self._started)}"]
        if self._step_seconds:
            # The median of the last steps, so that the first step or an evaluation hardly changes it.
            pace = statistics.median(self._step_seconds)
            figures += [f"left {_hours(pace * (self._total_steps - done))}", f"{pace:.1f} s/step"]
        if self._output.width < NARROW:
            figures = [figures[0], *figures[2:3]]
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(self._total_steps, 1), completed=done)
        line.add_row(Text(figures[0], style="bold"), bar, Text(" · ".join(figures[1:])))
        return line

    def _drawn_curves(self) -> list[Text]:
        room = max(min(self._output.width, MAX_WIDTH) - 30, 8)
        drawn, curves = [], self._curves
        for label, metric, text in CURVES:
            values = curves.get(metric, ())
            if known := [value for value in values if math.isfinite(value)]:
                ends = f"  {text(known[0])} → {text(known[-1])}"
                drawn.append(Text.assemble((f"{label:<8}", "bold"), (sparkline(values, room), "green"), ends))
        return drawn


@dataclass(frozen=True, slots=True)
class _CursorAtStart:
    """A frame with the cursor in the first column of its last line.

    After a full line, text that the terminal echoes (^C) would wrap into another line, and the next frame would start one
    line too low.
    """

    frame: RenderableType

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        *segments, _ = console.render(self.frame, options)  # the last segment ends the line
        yield from segments
        yield Control(ControlType.CARRIAGE_RETURN)


def _where_time_goes(reported: Sequence[Mapping[str, Any]], room: int) -> list[RenderableType]:
    """Render a bar with the share of each phase in the last steps, and the last step's speed and memory."""
    shares = phase_shares(reported)
    styles = dict(zip((phase for phase, _ in shares), cycle(PHASE_STYLES), strict=False))
    parts: list[RenderableType] = []
    if shares:
        bar, drawn, total = Text(no_wrap=True), 0, 0.0
        for phase, share in shares:
            total += share
            until = round(total * room)
            bar.append("━" * (until - drawn), style=styles[phase])
            drawn = until
        legend = Text()
        for phase, share in shares:
            entry = f"{'  ' if legend else ''}{phase.replace('_', ' ')} {share:.0%}"
            if share >= LEGEND_SHARE and len(legend) + len(entry) <= room:
                legend.append(entry, style=styles[phase])
        parts += [bar, legend]
    if figures := rates(reported[-1]):
        parts.append(Text(" · ".join(figures), style="dim", no_wrap=True, overflow="crop"))
    return parts


def _sample_lines(sample: tuple[int, str, str, float | None], room: int) -> list[Text]:
    """Render the end of a prompt and the start of its response, without terminal control characters."""
    step, prompt, response, score = sample
    title = f"sample of step {step}" + (f", reward {score:.3g}" if score is not None else "")
    lines = [Text(title, style="bold")]
    asked, response = (printable(text).strip() for text in (prompt, response))
    if len(asked) > room:
        asked = f"…{asked[-room + 1 :]}"
    for text, style in ((asked, "dim"), (response[: 2 * room], "")):
        lines.append(Text(text, style=style))
    return lines


def _recent_table(recent: Sequence[tuple[int, Mapping[str, Any]]], width: int) -> Table:
    """Render the last steps, one row each, with the reported figures that fit."""
    step_width = max(len("step"), len(str(recent[-1][0])))
    figures = figures_that_fit([metrics for _, metrics in recent], width - step_width)
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="dim")
    table.add_column("step", justify="right", vertical="bottom")
    for figure in figures:
        table.add_column("\n".join(figure.label.split()), justify="right", no_wrap=True)
    for step, metrics in recent:
        texts = [figure_text(figure, metrics) for figure in figures]
        table.add_row(str(step), *(Text(text, style="bold red" if text in NOT_FINITE else "") for text in texts))
    return table


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def phase_shares(reported: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the share of each phase in the time of the steps, the largest first."""
    seconds: dict[str, float] = {}
    for metrics in reported:
        for name, value in metrics.items():
            phase = name.removeprefix("timing/").removesuffix("_s")
            if name == f"timing/{phase}_s" and phase not in ("step", "tokens_per"):
                seconds[phase] = seconds.get(phase, 0.0) + float(value)
    total = sum(seconds.values())
    shares = [(phase, value / total) for phase, value in seconds.items()] if total > 0 else []
    return sorted(shares, key=lambda share: -share[1])


def rates(metrics: Mapping[str, Any]) -> list[str]:
    """Return the reported speed and memory of a step as texts."""
    parts = []
    if (speed := metrics.get("timing/tokens_per_s")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (mfu := metrics.get("throughput/mfu")) is not None:
        parts.append(f"mfu {percent(mfu)}")
    for suffix in ("_allocated_bytes", "_bytes"):
        peaks = [value for name, value in metrics.items() if name.startswith("memory/") and name.endswith(suffix)]
        if peaks:
            parts.append(f"memory {max(peaks) / 2**30:.1f} GiB")
            break
    if outside := [value for name, value in metrics.items() if name.endswith("_outside_bytes")]:
        parts.append(f"{max(outside) / 2**30:.1f} GiB outside torch")
    return parts


def figures_that_fit(reported: Sequence[Mapping[str, Any]], width: int) -> list[Figure]:
    """Return the figures that ``reported`` contains, in order. Drop figures until all columns fit into ``width``."""
    figures = [figure for figure in FIGURES if any(figure_text(figure, metrics) for metrics in reported)]
    while sum(figure.column_width + 2 for figure in figures) > width:
        figures.remove(min(figures, key=lambda figure: figure.worth))
    return figures


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a row of at most ``width`` bars, scaled between their minimum and maximum. Neighbours are averaged to fit.

    A constant is shown at mid height, and a value that is not finite as a blank.
    """
    num_bars = min(len(values), width)
    edges = [len(values) * bar // num_bars for bar in range(num_bars + 1)] if num_bars else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * len(means)
    least, spread = min(finite), max(finite) - min(finite)
    heights = [(mean - least) / spread if spread > 0 else 0.5 for mean in means]
    return "".join(BARS[min(int(h * len(BARS)), len(BARS) - 1)] if math.isfinite(h) else " " for h in heights)
