"""Show how far an evaluation is, in one line of the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

MAX_SHOWN = 26  # letters of a name in the line of progress


def progress_columns() -> tuple[ProgressColumn, ...]:
    """List the columns of the progress line: 80 characters with a name of ``MAX_SHOWN``."""
    count = TextColumn("{task.completed}/{task.total} prompts")
    name = TextColumn("{task.description}", markup=False)
    return name, BarColumn(bar_width=16), TaskProgressColumn(), count, TimeRemainingColumn()


@contextmanager
def progress(mode: str, name: str, total: int, done: int, share: int) -> Iterator[Callable[[int], None]]:
    """Show how many prompts are scored, on rank 0 for all engines: they have equal shares. Yields what to call with a count.

    Args:
        mode: ``logging.console``.
        name: of what is evaluated.
        total: prompts, of which ``done`` are scored already.
        share: engines, each of which scores as many as this one.
    """
    if dist.get_rank() != 0 or mode == "off" or (mode != "rich" and not sys.stdout.isatty()):
        yield lambda count: None
        return
    with Progress(*progress_columns()) as bar:
        row = bar.add_task(f"…{name[1 - MAX_SHOWN :]}" if len(name) > MAX_SHOWN else name, total=total)
        bar.advance(row, done)
        yield lambda count: bar.advance(row, count * share)
