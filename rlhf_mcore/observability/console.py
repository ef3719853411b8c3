"""Shows the progress of a run: a live display on a terminal, one line per step in a log."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from textwrap import TextWrapper
from types import TracebackType
from typing import Any

import rich.console
from rich import box
from rich.table import Table
from rich.text import Text

from rlhf_mcore.config.errors import ConfigError, for_terminal, printable
from rlhf_mcore.config.keys import choices_of
from rlhf_mcore.observability.figures import explain_labels, step_line
from rlhf_mcore.observability.files import json_line
from rlhf_mcore.observability.live_display import LiveDisplay

MAX_WARNINGS = 20  # maximum number of printed warnings of other ranks


class Console:
    """The progress of a run, for rank 0: ``with Console("auto", total_steps, title) as console: ...``.

    ``mode``: "rich" is a live display, "plain" one line per step, "auto" rich on a terminal and plain elsewhere, "json" one
    object per line, "off" prints nothing. ``first_step``: number of steps before a resume. ``every``: interval in steps
    between step lines. ``output``: a console other than standard output, for tests.

    Raises:
        ConfigError: the mode is unknown.
    """

    def __init__(
        self,
        mode: str,
        total_steps: int,
        title: str,
        *,
        first_step: int = 0,
        every: int = 1,
        output: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in (modes := choices_of("logging.console")):
            raise ConfigError(f"logging.console={mode!r}: must be one of {', '.join(modes)}")
        self.total_steps, self._every = total_steps, every
        self.title = for_terminal(title)
        if mode == "auto":
            mode = "rich" if sys.stdout.isatty() and not rich.console.Console().is_dumb_terminal else "plain"
        self.mode = mode
        is_rich = self.mode == "rich"
        self._output = output or rich.console.Console(force_terminal=is_rich, no_color=None if is_rich else True)
        self._clock = clock
        self._step_ended = clock()
        self.display: LiveDisplay | None = None
        if mode == "rich":
            self.display = LiveDisplay(self._output, self.title, total_steps, first_step, clock)
        self._warnings: set[str] = set()
        self._explained = False  # whether the labels of step lines were explained

    def __enter__(self) -> Console:
        self._step_ended = self._clock()
        if self.display is not None:
            self.display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.display is not None:
            self.display.stop("stopped")

    def phase(self, name: str) -> None:
        """Show the current phase: generate, score, update, ... Live display only."""
        if self.display is not None:
            self.display.phase(name)

    def progress(self, text: str) -> None:
        """Show the progress within the phase. Live display only."""
        if self.display is not None:
            self.display.progress(text)

    def sample(self, step: int, prompt: str, response: str, score: float | None) -> None:
        """Show a response of the model. Live display only."""
        if self.display is not None:
            self.display.sample(step, prompt, response, score)

    def warning(self, rank: int, text: str) -> None:
        """Show a warning of another rank, once. Live display only, because the logs of the ranks contain it too."""
        if self.mode == "rich" and text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            self._print(f"rank {rank}: {printable(text)}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report step ``step`` (from 1) as finished, with its metrics under their names in metrics.jsonl."""
        now = self._clock()
        seconds = metrics.get("timing/step_s", now - self._step_ended)
        self._step_ended = now
        if self.display is not None:
            self.display.step(step, metrics, float(seconds))
        is_evaluated = any(name.startswith("evaluate/") for name in metrics)
        if (step - 1) % self._every and step != self.total_steps and not is_evaluated:
            return
        if self.mode == "plain":
            if not self._explained and (explained := explain_labels(metrics)):
                self._explained = True
                self._print(explained)
            self._print(step_line(step, self.total_steps, metrics))
        elif self.mode == "json":
            self._print_json({"step": step, **metrics})

    def acknowledge(self, text: str) -> None:
        """Confirm a request immediately. Safe inside a signal handler, which may have interrupted another print."""
        if self.display is not None and self.display.is_live:
            self.display.request(text)
        elif self.mode != "off":
            line = json_line({"note": text}) if self.mode == "json" else f"{for_terminal(text)}\n".encode()
            with suppress(OSError):  # a full disk, or a notebook's output, which is not a file
                os.write(self._output.file.fileno(), line)

    def note(self, text: str) -> None:
        """Print a permanent message about an event."""
        if self.mode == "json":
            self._print_json({"note": text})
        elif self.mode == "rich":  # wrap between words only, so that a path stays whole
            words = TextWrapper(self._output.width, subsequent_indent="  ", replace_whitespace=False)
            words.break_long_words = words.break_on_hyphens = False
            self._print("\n".join(map(words.fill, text.splitlines())))
        elif self.mode != "off":
            self._print(text)

    def summary(
        self, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...], footer: Sequence[str]
    ) -> None:
        """Print the final table of a run, followed by lines of unwrapped text. Stop the live display."""
        if self.display is not None:
            self.display.stop("done")
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

    def _print_json(self, content: Mapping[str, Any]) -> None:
        line = json_line(content).decode("utf-8")
        self._output.file.write(line if for_terminal(line) == line else f"{json.dumps(json.loads(line))}\n")
        self._output.file.flush()

    def _print(self, text: str) -> None:
        """Print a line without markup or wrapping, because a path must stay whole."""
        self._output.print(for_terminal(text), markup=False, highlight=False, soft_wrap=True)
