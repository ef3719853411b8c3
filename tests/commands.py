"""Start commands, wait for them, and check their processes and remaining files. Time limits scale with the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[1]


def wait_for(
    condition: Callable[[], object],
    seconds: float = 240,
    explain: Callable[[], str] = str,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until a condition holds or ``ended()`` is true. ``seconds``: limit on the reference machine (tests/machine_speed.py)."""
    end = time.monotonic() + scale_seconds(seconds)
    while not condition():
        if ended():
            assert condition(), f"it has ended, and this did not happen\n{explain()}"
            return
        assert time.monotonic() < end, f"it did not happen within {scale_seconds(seconds):.0f} s\n{explain()}"
        time.sleep(0.1)


@dataclass(slots=True)
class Started:
    """A running command. Its output goes to a file, because a full pipe without reader would block it."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Wait until a condition holds, at most until the command ends."""
        wait_for(condition, seconds, self._explain, lambda: self.process.poll() is not None)

    def end(self, seconds: float = 240) -> str:
        """Wait until the command ends. Returns its output."""
        try:
            self.process.wait(timeout=scale_seconds(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {scale_seconds(seconds):.0f} s\n{self._explain()}") from None
        return self.output()

    def _explain(self) -> str:
        return f"exit code {self.process.poll()}\n{self.output()[-6000:]}"


@contextmanager
def start_command(
    command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Started]:
    """Run a command in a directory. At the end of the block, kill it and all processes that it has started."""
    log = directory / f"output-{time.monotonic_ns()}.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Started(process, log)
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def run_command(
    command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends. Returns its exit code and output."""
    limit = scale_seconds(seconds)
    try:
        return subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as late:
        printed = b"".join(part[-3000:] for part in (late.stdout, late.stderr) if isinstance(part, bytes))
        raise AssertionError(f"it did not end within {limit:.0f} s\n{printed.decode(errors='replace')}") from None


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a command with a separate temporary folder, so that tests find files that a kill leaves there."""
    (directory / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(directory / "tmp")}


def python_path() -> str:
    """Return PYTHONPATH with this repository first. It keeps the path of an emulated processor or of another Megatron-core."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def left_behind(directory: Path) -> list[str]:
    """Return the files that remain in the temporary folder after kills.

    Skip torch's cache of compiled code, which the next run uses.
    """
    return [path.name for path in (directory / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:  # the process has just ended
                continue
    return found[1:]


def describe_processes(pids: Iterable[int]) -> str:
    """Return a line with the id, the state and the command of each process that still exists."""
    lines = []
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            lines.append(f"{pid} {state} {command[:300]}")
    return "\n".join(lines)


def processes_with(name: str, value: str) -> list[int]:
    """Return the ids of the living processes with this value of an environment variable."""
    found, wanted = [], f"{name}={value}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
