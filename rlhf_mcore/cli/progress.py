"""What a person sees while a command works for longer than a moment: on a terminal's standard error, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over ``total`` bytes. Yields what to call with a number of bytes, from any thread."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as display:
        task = display.add_task(what, total=total)
        yield lambda num_bytes: display.advance(task, num_bytes)


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A line with the time that has passed, and a bar where the number of parts is known. Yields what to call when a part begins."""
    console = Console(stderr=True)
    bar = [] if total is None else [BarColumn()]
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bar, TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as display:
        task, begun = display.add_task(what, total=total), 0

        def begin(part: str) -> None:
            nonlocal begun
            display.update(task, description=f"{what} {part}", completed=begun)
            begun += 1

        yield begin
