"""What tests of launching ask of the machine: which processes there are, and whether something has happened yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(condition: Callable[[], object], seconds: float = 240, explain: Callable[[], str] = str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen\n{explain()}"
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Ids of the processes that a process has started, and those that these have started, and so on."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:  # it has just ended
                continue
    return found[1:]


def processes_with(name: str, value: str) -> list[int]:
    """Ids of the living processes that have an environment variable of this value."""
    found, wanted = [], f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
