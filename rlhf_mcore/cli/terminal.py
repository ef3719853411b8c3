"""The one way of commands to a terminal: what models, rewards, environments and files hold must not command it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rlhf_mcore.config.errors import for_terminal


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
