"""Show progress while a command works for longer than a moment: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rlhf_mcore.config.errors import for_terminal

T = TypeVar("T")
ROWS_BETWEEN = 500  # two changes of a count


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over ``total`` bytes. Yields a function of a number of bytes, for any thread."""
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


def of_run(mode: str) -> Console:
    """Return the place where a run shows its start: the terminal of its launcher and of the first rank, if any."""
    shown = os.environ.get("RANK", "0") == "0" and mode in ("auto", "rich") and sys.stdout.isatty()
    return Console() if shown else Console(file=io.StringIO())
