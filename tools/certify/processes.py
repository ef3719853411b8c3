"""Run a program from this checkout, with a time limit and its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"  # packages of an unpacked archive
STANDINS = ROOT / "tools" / "standins"  # for xxhash, which is compiled
_GRACE_S = 20


def run_python(arguments: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run ``python ARGUMENTS``. Returns the exit code, or None at the time limit. Its child processes end with it."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=out, stderr=out, env=environment(), cwd=ROOT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def run_ranks(module: str, arguments: Sequence[str], ranks: int, log: Path, limit_s: float) -> int | None:
    """Run a module under torchrun on the loopback. Returns the same as ``run_python``."""
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *meeting, "-m", module]
    return run_python([*torchrun, *arguments], log, limit_s)


def environment() -> dict[str, str]:
    """Return this process's environment, with the packages of a checkout or an archive on the path."""
    paths = [str(ROOT), *([str(SITE)] if SITE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    if find_spec("xxhash") is None:
        paths.append(str(STANDINS))
    loopback = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": loopback}


def last_line(log: Path) -> str:
    """Return the last line of a log, shortened."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
    return lines[-1][:200]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: SIGTERM, so that it ends its own children, then SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
