"""Output and exit codes of all commands: texts without control characters, progress, and reports of errors.

The library rich is imported when progress is shown.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeVar

from rlhf_mcore.config.errors import ConfigError, for_terminal
from rlhf_mcore.foreign import shorten
from rlhf_mcore.observability.files import FullDiskError, full_disks
from rlhf_mcore.observability.rank_file import CONSEQUENCE, FAILURE, USER, is_read, note_error
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.redaction import without_secrets
from rlhf_mcore.residency.ledger import OutOfDeviceMemory

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
T = TypeVar("T")

DONE = 0
FAILED = 1
USER_ERROR = 2
# EX_UNAVAILABLE, between our own commands only: the rendezvous port was taken in the meantime, choose another one
PORT_TAKEN = 69
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved and not finished, start the same command again
STOPPED = 76  # an alarm stopped the run after a save: nothing restarts it automatically
INTERRUPTED = 130  # 128 + SIGINT, as in a shell

EPILOG = """\
exit codes:
  0          done: the last step is saved
  2          an error in the configuration, the command line or the data; the message names it
  75         Ctrl-C, a signal or the time limit ended the run after a save; start the same command again
  76         an alarm with the action stop ended the run after a save
  others     failure (128 + N: ended by signal N)"""

TOOL_EPILOG = """\
exit codes:
  0          done
  2          an error in the command line or in a file that it names; the message names it
  others     failure (128 + N: ended by signal N)"""

OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE)  # the disk of the output is full, or its reader has closed it

# Errors that this rank raises after another rank has ended.
_CONSEQUENCES = ("RanksFailed", "DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER = re.compile(r"gloo/|Connection (closed|reset) by peer")
_OF_PATHS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
    }
)
_MAX_LINES = 12  # maximum number of lines of a library's error text
_LIBRARIES = re.compile(r"site-packages|/lib/python3|<frozen")
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


@contextlib.contextmanager
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


@contextlib.contextmanager
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


def to_shell_code(returncode: int) -> int:
    """Convert a child's return code to a shell's exit code: -N (ended by signal N) becomes 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit in the block, so that no partial file and no child process is left behind."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def report(error: Exception) -> int:
    """Report an error once, and return its exit code.

    The message is always written to the report of the rank (``observability.rank_file``). If one of our commands started
    the rank, that command prints one message for all ranks, and the traceback goes to the rank's log. Under the user's own torchrun,
    or without torchrun, the message is printed here. A user error occurs on every rank, so only rank 0 prints it.
    """
    kind, text = kind_of(error), without_secrets(cause(error))
    note_error(kind, text)
    with contextlib.suppress(OSError):  # the log may be on a full disk
        if kind == FAILURE or (is_read() and kind == CONSEQUENCE):
            say(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    with contextlib.suppress(OSError):
        if is_read() or kind == FAILURE or not _is_told_by_another(os.environ):
            rank = f"rank {os.environ['RANK']}: " if kind != USER and "RANK" in os.environ else ""
            say(f"error: {rank}{text}", file=sys.stderr)
    return USER_ERROR if kind == USER else FAILED


def report_of_tool(error: ConfigError | OSError) -> int:
    """Report an error of a command that takes paths, like ``report``.

    An invalid path is a user error; a full disk is not.
    """
    if not isinstance(error, OSError):
        return report(error)
    text = f"{shorten(str(error.filename), 200)}: {error.strerror}" if error.filename else str(error)
    if error.errno in _OF_PATHS:
        return report(ConfigError(f"{text}; correct the path"))
    say(f"error: {text}", file=sys.stderr)
    return FAILED


def report_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command to report user errors and invalid paths in one message, and to return their exit code."""

    @functools.wraps(main)
    def call_main(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except (ConfigError, OSError) as error:
            if isinstance(error, OSError) and error.errno in OF_OUTPUT and not isinstance(error, FullDiskError):
                raise  # ``cli.main`` discards the rest of the output
            return report_of_tool(error)

    return call_main


def kind_of(error: BaseException) -> str:
    """Return the kind of an error: USER, FAILURE, or CONSEQUENCE if another rank has ended."""
    if isinstance(error, ConfigError):
        return USER
    lost = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    return CONSEQUENCE if lost or type(error).__name__ in _CONSEQUENCES else FAILURE


def cause(error: BaseException) -> str:
    """Describe an error in a few lines: our own errors by their message, others also by class and source line."""
    lines = str(error).strip().splitlines()
    text = "\n".join(lines if isinstance(error, ConfigError | OutOfDeviceMemory) else lines[:_MAX_LINES])
    if type(error).__module__.startswith("rlhf_mcore"):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _LIBRARIES.search(frame.filename)] or list(frames)
    where = f" ({shown_path(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}{full_disks_here()}"


def full_disks_here() -> str:
    """Name the full disks among the disks for output, the working and temporary directories, and shared memory."""
    outputs = [f"/proc/self/fd/{number}" for number in (1, 2)]
    files = [os.path.dirname(os.path.realpath(each)) for each in outputs if os.path.isfile(each)]
    return full_disks([*files, os.environ.get("TMPDIR", "/tmp"), ".", "/dev/shm"])


def _is_told_by_another(environment: Mapping[str, str]) -> bool:
    """Return whether this process is not rank 0, so that rank 0 reports the error."""
    rank, world_size = environment.get("RANK", "0"), environment.get("WORLD_SIZE", "")
    return rank.isdecimal() and world_size.isdecimal() and 0 < int(rank) < int(world_size)
