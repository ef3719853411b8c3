"""What a person sees during a run: a live display on a terminal, one line per step in a log."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from textwrap import TextWrapper
from types import TracebackType
from typing import Any

import rich.console
from rich import box
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf_mcore.config.errors import ConfigError, for_terminal
from rlhf_mcore.config.keys import choices_of
from rlhf_mcore.observability.figures import (
    CURVES,
    explain_labels,
    figure_text,
    figures_that_fit,
    phase_shares,
    rates,
    sparkline,
    step_line,
)
from rlhf_mcore.observability.files import json_line

RECENT_STEPS = 6
MAX_WIDTH = 110
NARROW = 70
PANEL_EDGES = 4
PHASE_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "white")
LEGEND_SHARE = 0.01  # a phase with less of the time is not named
SAMPLE_HEIGHT = 28  # lines of a terminal that has room for a sample
MAX_WARNINGS = 20  # of other ranks
NOT_FINITE = ("nan", "inf", "-inf")
REFRESHES_PER_SECOND = 4


class Console:
    """A run's progress, for rank 0: ``with Console("auto", total_steps, title) as console: ...``.

    ``mode``: "rich" is a live display, "plain" one line per step, "auto" rich on a terminal and plain elsewhere, "json" an object per
    line, "off" prints nothing. ``first_step``: steps that were made before, by a run that is continued. ``output`` is where it goes,
    standard output except in tests.

    Raises:
        ConfigError: an unknown mode.
    """

    def __init__(
        self,
        mode: str,
        total_steps: int,
        title: str,
        *,
        first_step: int = 0,
        output: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in (modes := choices_of("logging.console")):
            raise ConfigError(f"logging.console={mode!r}: must be one of {', '.join(modes)}")
        self.total_steps = total_steps
        self.title = for_terminal(title)
        self._first_step = first_step
        self._request = ""
        if mode == "auto":
            mode = "rich" if sys.stdout.isatty() and not rich.console.Console().is_dumb_terminal else "plain"
        self.mode = mode
        self._output = output or (
            rich.console.Console(force_terminal=True)
            if self.mode == "rich"
            else rich.console.Console(force_terminal=False, no_color=True)
        )
        self._clock = clock
        self._live: Live | None = None
        self._started = self._phase_started = self._step_ended = clock()
        self._phase = Spinner("dots", text="starting", style="cyan")
        self._phase_name = "starting"
        # Replaced, never changed in place: the display is drawn from a thread of its own.
        self._recent: tuple[tuple[int, Mapping[str, Any]], ...] = ()
        self._curves: dict[str, tuple[float, ...]] = {}  # by metric
        self._progress_text = ""
        self._sample: tuple[int, str, str, float | None] | None = None
        self._warnings: set[str] = set()
        self._step_seconds: tuple[float, ...] = ()
        self._explained = False  # the labels of step lines

    def __enter__(self) -> Console:
        self._started = self._phase_started = self._step_ended = self._clock()
        if self.mode == "rich":
            self._live = Live(
                get_renderable=lambda: _CursorAtStart(self.render()),
                console=self._output,
                refresh_per_second=REFRESHES_PER_SECOND,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop("stopped")

    def phase(self, name: str) -> None:
        """Show what is being done now: generate, score, update, ... The live display only."""
        self._phase_name, self._phase_started, self._progress_text = name.replace("_", " "), self._clock(), ""

    def progress(self, text: str) -> None:
        """How far the phase is. The live display only."""
        self._progress_text = text

    def sample(self, step: int, prompt: str, response: str, score: float | None) -> None:
        """Show a response that the model has written. The live display only."""
        self._sample = step, prompt, response, score

    def warning(self, rank: int, text: str) -> None:
        """What another rank warns of, once. The live display only: logs of ranks have it too."""
        if self.mode == "rich" and text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            self._print(f"rank {rank}: {printable(text)}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report step ``step`` (from 1) as finished, with its metrics under the names of metrics.jsonl."""
        now = self._clock()
        seconds = metrics.get("timing/step_s", now - self._step_ended)
        self._step_ended = now
        if step > 0:  # step 0 is the evaluation before training
            self._step_seconds = (*self._step_seconds, float(seconds))[-2 * RECENT_STEPS :]
        self._recent = (*self._recent, (step, dict(metrics)))[-RECENT_STEPS:]
        for curve in CURVES:
            if (value := metrics.get(curve.metric)) is not None:  # replaced in one step: the display reads it
                self._curves = {**self._curves, curve.metric: (*self._curves.get(curve.metric, ()), float(value))}
        if self.mode == "plain":
            if not self._explained and (explained := explain_labels(metrics)):
                self._explained = True
                self._print(explained)
            self._print(step_line(step, self.total_steps, metrics))
        elif self.mode == "json":
            self._print_json({"step": step, **metrics})

    def acknowledge(self, text: str) -> None:
        """Show at once that something was asked for. Safe inside a signal handler, which may have cut another print short."""
        if self._live is not None:
            self._request = text
        elif self.mode != "off":
            line = json_line({"note": text}) if self.mode == "json" else f"{for_terminal(text)}\n".encode()
            with suppress(OSError):  # of a full disk, of a notebook's output, which is no file
                os.write(self._output.file.fileno(), line)

    def note(self, text: str) -> None:
        """Print a line that stays: an event rather than a number."""
        if self.mode == "json":
            self._print_json({"note": text})
        elif self.mode == "rich":  # between words: a path stays whole
            words = TextWrapper(self._output.width, subsequent_indent="  ", replace_whitespace=False)
            words.break_long_words = words.break_on_hyphens = False
            self._print("\n".join(map(words.fill, text.splitlines())))
        elif self.mode != "off":
            self._print(text)

    def summary(
        self, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...], footer: Sequence[str]
    ) -> None:
        """Print the table that a run ends with, and below it lines of text as they are. Ends the live display."""
        self._stop("done")
        if self.mode == "off":
            return
        if self.mode == "json":
            self._print_json({"title": title, "header": header, "rows": rows, "footer": footer})
            return
        table = Table(title=title, title_style="bold", title_justify="left", box=box.ROUNDED)
        for place, name in enumerate(header):
            table.add_column(name, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*(Text(for_terminal(cell)) for cell in row))
        self._output.print()
        self._output.print(table)
        for line in footer:
            self._print(line)

    def render(self) -> RenderableType:
        """The live display as it stands now."""
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
            Group(*parts), title=Text(self.title, style="bold"), title_align="left", width=width, padding=(0, 1)
        )

    def _progress(self) -> RenderableType:
        done = self._recent[-1][0] if self._recent else self._first_step
        figures = [f"step {done}/{self.total_steps}", f"elapsed {_hours(self._clock() - self._started)}"]
        if self._step_seconds:
            # The median of the last steps, so that neither the first step nor an evaluation moves it much.
            pace = statistics.median(self._step_seconds)
            figures += [f"left {_hours(pace * (self.total_steps - done))}", f"{pace:.1f} s/step"]
        if self._output.width < NARROW:
            figures = [figures[0], *figures[2:3]]
        line = Table.grid(padding=(0, 2), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(self.total_steps, 1), completed=done)
        line.add_row(Text(figures[0], style="bold"), bar, Text(" · ".join(figures[1:])))
        return line

    def _drawn_curves(self) -> list[Text]:
        room = max(min(self._output.width, MAX_WIDTH) - 30, 8)
        drawn, curves = [], self._curves
        for curve in CURVES:
            values = curves.get(curve.metric, ())
            if known := [value for value in values if math.isfinite(value)]:
                ends = f"  {curve.text(known[0])} → {curve.text(known[-1])}"
                drawn.append(Text.assemble((f"{curve.label:<8}", "bold"), (sparkline(values, room), "green"), ends))
        return drawn

    def _print_json(self, content: Mapping[str, Any]) -> None:
        line = json_line(content).decode("utf-8")
        self._output.file.write(line if for_terminal(line) == line else f"{json.dumps(json.loads(line))}\n")
        self._output.file.flush()

    def _print(self, text: str) -> None:
        """A line as it is: no markup, no wrapping (a path must stay whole)."""
        self._output.print(for_terminal(text), markup=False, highlight=False, soft_wrap=True)

    def _stop(self, last_phase: str) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._phase_name, self._request = last_phase, ""
            live.stop()


@dataclass(frozen=True, slots=True)
class _CursorAtStart:
    """A frame with the cursor in the first column of its last line.

    Behind a full line what the terminal echoes (^C) would wrap into a further one, and the next frame begin a line too low.
    """

    frame: RenderableType

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        *segments, _ = console.render(self.frame, options)  # the last one is a line's end
        yield from segments
        yield Control(ControlType.CARRIAGE_RETURN)


def _where_time_goes(reported: Sequence[Mapping[str, Any]], room: int) -> list[RenderableType]:
    """A bar of the phases with their shares of the last steps, and what the last one reports of speed and memory."""
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
    """The end of a prompt and the beginning of its response, without what a terminal would take for a command."""
    step, prompt, response, score = sample
    title = f"sample of step {step}" + (f", reward {score:.3g}" if score is not None else "")
    lines = [Text(title, style="bold")]
    asked, response = (printable(text).strip() for text in (prompt, response))
    if len(asked) > room:
        asked = f"…{asked[-room + 1 :]}"
    for text, style in ((asked, "dim"), (response[: 2 * room], "")):
        lines.append(Text(text, style=style))
    return lines


def printable(text: str) -> str:
    """On one line, without control characters: what a model or another program has written must not reach a terminal as it is."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _recent_table(recent: Sequence[tuple[int, Mapping[str, Any]]], width: int) -> Table:
    """The last steps, one row each, with the figures they report and there is room for."""
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
