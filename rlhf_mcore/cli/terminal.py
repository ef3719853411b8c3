"""The one way of commands to a terminal: texts, which must not command it, and progress, which is shown on a terminal only.

The library (rich) is imported when progress is shown.
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
ROWS_BETWEEN = 500  # two changes of a count


def say(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = True) -> None:
    """Print a text. Lines stay lines, other control characters are escaped. ``file``: standard output."""
    print(for_terminal(str(text)), file=sys.stdout if file is None else file, end=end, flush=flush)


def aligned(rows: Iterable[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Write each row on a line, with its cells below those of the row before."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{indent}{'  '.join(cells)}".rstrip()


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over ``total`` bytes. Yields a function of a number of bytes, for any thread."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as display:
        task = display.add_task(what, total=total)
        yield lambda num_bytes: display.advance(task, num_bytes)


@contextmanager
def working(what: str, total: int | None = None, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a line with the time that has passed, and a bar where the number of parts is known. Yields a function to call when a
    part begins.

    It is on standard error, unless there is another ``console``.
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


def counted(rows: Iterable[T], what: str) -> Iterator[T]:
    """Yield ``rows``, while a line shows how many were taken."""
    with working(what) as begin:
        for number, row in enumerate(rows):
            if number % ROWS_BETWEEN == 0:
                begin(f"{number:,}")
            yield row


def find_console(mode: str) -> Console:
    """Return the place where a run shows its start: the terminal of its launcher and of the first rank, if any."""
    from rich.console import Console

    shown = os.environ.get("RANK", "0") == "0" and mode in ("auto", "rich") and sys.stdout.isatty()
    return Console() if shown else Console(file=io.StringIO())
