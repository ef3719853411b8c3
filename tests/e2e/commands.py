"""Commands as a user starts them, in a directory whose temporary folder shows what a kill leaves there."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(directory: Path) -> dict[str, str]:
    """With a temporary folder of its own, so that what a kill leaves there is seen."""
    (directory / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}


@contextmanager
def started(command: Sequence[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that is killed at the end of the block."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment(directory),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def left_behind(directory: Path) -> list[str]:
    """What kills have left in the temporary folder, but for torch's cache of compiled code, which the next run uses."""
    return [path.name for path in (directory / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
