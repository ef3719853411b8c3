"""Reports from a rank to the process that started it, in the file that torchrun provides for a rank's error.

Under our own commands, the file is one JSON object in memory (``cli.rank_files``) with phases, signs of life, the first step
and the end. Under the user's own torchrun, only an error is written, as
``torch.distributed.elastic.multiprocessing.errors.record`` does.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import write_atomically

VARIABLE = "TORCHELASTIC_ERROR_FILE"
IN_MEMORY = "/proc/"  # prefix of the path under our own commands
# The cause of a rank's end: the user's mistake, a failure, or the end of another rank.
USER, FAILURE, CONSEQUENCE = "user", "failure", "consequence"

_MAX_TEXT = 10_000  # characters, with up to 12 bytes each as JSON
_ALIVE_S = 1.0
_lock = threading.RLock()


def is_read() -> bool:
    """Return whether one of our commands started this rank. The command then reports errors and watches the rank's progress."""
    return os.environ.get(VARIABLE, "").startswith(IN_MEMORY)


def note_start() -> None:
    """Report the start of the process. From now on, a thread reports every second that it is alive."""
    number = os.environ.get("RANK", "0")
    rank = int(number) if number.isdecimal() else 0  # the user gets a proper message later
    _update(lambda _: {"rank": rank, "pid": os.getpid(), "phase": "starting", "phases": 0, "progress": 0, "limit_s": 0})
    if is_read():
        threading.Thread(target=_note_life, name="alive", daemon=True).start()


def watch(limit_s: int) -> None:
    """Request that the run ends if no rank starts a phase or beats for ``limit_s`` seconds; 0 excludes this rank."""
    _update(lambda told: {"limit_s": limit_s, "progress": told["progress"] + 1})


def note_phase(name: str) -> None:
    """Report the start of a phase."""
    _update(lambda told: {"phase": name, "phases": told["phases"] + 1, "progress": told["progress"] + 1})


def beat() -> None:
    """Report progress within a phase."""
    _update(lambda told: {"progress": told["progress"] + 1})


def note_training() -> None:
    """Report the start of the first step. From now on there is something to save."""
    _update(lambda _: {"training": True})


def note_done() -> None:
    """Report that the last step is finished and saved."""
    _update(lambda _: {"done": True})


def note_error(kind: str, text: str) -> None:
    """Report the error that ends the rank. ``kind``: USER, FAILURE or CONSEQUENCE."""
    _update(lambda _: {"kind": kind, "message": text[:_MAX_TEXT], "time": time.time()})
    if (path := os.environ.get(VARIABLE)) and not is_read():
        # Written atomically, because torchrun cannot read half a file.
        with suppress(OSError, ConfigError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), json.dumps({"message": text, "timestamp": int(time.time())}).encode())


def _update(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Update entries of the object. Its size never shrinks."""
    if not is_read():
        return
    # The process that started this rank may be gone. A file without a start entry is not changed.
    with _lock, suppress(OSError, ValueError, KeyError), open(os.environ[VARIABLE], "r+b", buffering=0) as file:
        content = file.read()
        told = json.loads(content)
        told |= {**change(told), "timestamp": int(time.time())}
        file.seek(0)
        file.write(json.dumps(told).encode().ljust(len(content)))


def _note_life() -> None:
    while True:
        time.sleep(_ALIVE_S)
        _update(lambda told: {"alive": told.get("alive", 0) + 1})
