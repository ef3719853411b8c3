"""Terminal output of all commands: texts without control characters, and progress, which is shown on a terminal only.

The library rich is imported when progress is shown.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, TypeVar

from rlhf_mcore.config.errors import for_terminal

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
ROWS_BETWEEN = 500  # rows between two updates of a counter


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = True) -> None:
    """Print a text and escape its control characters, except line ends. ``file``: None means standard output."""
    print(for_terminal(str(text)), file=sys.stdout if file is None else file, end=end, flush=flush)


def align_columns(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield one line per row, with the cells aligned in columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()


@contextmanager
def progress_bar(console: Console, what: str, total: int, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Show a progress bar over ``total`` units: bytes, or other things of which the bar shows the count.

    Yields a function that advances the bar by a number of units. Any thread may call it.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    name, left = TextColumn("{task.description}", markup=False), TimeRemainingColumn()
    columns: tuple[ProgressColumn, ...] = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), left)
    if unit != "bytes":
        count = TextColumn(f"{{task.completed}}/{{task.total}} {unit}")
        columns = (name, BarColumn(bar_width=16), TaskProgressColumn(), count, left)
    with Progress(*columns, console=console, disable=not console.is_terminal) as display:
        task = display.add_task(for_terminal(what), total=total)
        yield lambda number: display.advance(task, number)


@contextmanager
def working(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a line with the elapsed time, and a progress bar if ``total`` gives the number of parts.

    Yields a function to call with the name of each part when the part begins. The line is written to ``console``, by default
    standard error.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = console or Console(stderr=True)
    bar = [] if total is None else [BarColumn()]
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bar, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as display:
        task, begun = display.add_task(what, total=total), 0

        def begin(part: str) -> None:
            nonlocal begun
            display.update(task, description=for_terminal(f"{what} {part}"), completed=begun)
            begun += 1

        yield begin


def show_progress(rows: Iterable[T], what: str) -> Iterator[T]:
    """Yield ``rows``, and show the number of rows so far."""
    with working(what) as begin:
        for number, row in enumerate(rows):
            if number % ROWS_BETWEEN == 0:
                begin(f"{number:,}")
            yield row


def find_console(mode: str) -> Console:
    """Return the console that shows the start of a run: the terminal on the launcher and the first rank, else a null console."""
    from rich.console import Console

    shown = os.environ.get("RANK", "0") == "0" and mode in ("auto", "rich") and sys.stdout.isatty()
    return Console() if shown else Console(file=io.StringIO())
