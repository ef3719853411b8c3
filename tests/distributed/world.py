"""Start torchrun worlds for many tests. A worker script runs all checks and writes its findings as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from rlhf_mcore.cli.agent import supervisor_command
from tests.commands import descendants
from tests.distributed import forked, nccl_rules, rank_failures
from tests.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[2]


def run_world(worker: str, num_ranks: int, directory: Path, *arguments: str, timeout_s: int = 500) -> Any:
    """Run ``main(directory, *arguments)`` of the module ``tests.<worker>`` on ``num_ranks`` processes.

    Returns the content of the first rank's findings.json, or None if there is no such file.

    Raises:
        AssertionError: a rank failed. The text contains the message and the traceback of the first failing rank, or the end of the
            output if no rank raised.
    """
    with (directory / "output.txt").open("w+") as output:
        failures = _folder_beside(output)
        process = _start(worker, num_ranks, output, failures, str(directory), *arguments)
        problem = ""
        try:
            if process.wait(timeout=scale_seconds(timeout_s)):
                problem = f"{worker} ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"{worker} did not end within {scale_seconds(timeout_s):.0f} s"
        finally:
            _kill(process)
        if problem:
            raise _describe_failure(failures, problem, output)
    findings = directory / "findings.json"
    return json.loads(findings.read_text()) if findings.exists() else None


class World:
    """Ranks that run one worker after the other (serving_worker.py), because importing Megatron takes longer than most checks.

    If a worker kills the ranks, they are restarted for the next worker.
    """

    def __init__(self, num_ranks: int, directory: Path) -> None:
        self._num_ranks, self._directory = num_ranks, directory
        self._process: subprocess.Popen[str] | None = None
        self._output: IO[str] | None = None
        self._num_starts = self._num_requests = 0

    def run(self, worker: str, directory: Path, *arguments: str, timeout_s: int = 560) -> Any:
        """Run ``tests.distributed.<worker>.main(directory, *arguments)`` on all ranks. Returns the findings of the first rank.

        Raises:
            AssertionError: as for ``run_world``.
        """
        if self._process is None or self._process.poll() is not None:
            self._restart()
        assert self._process is not None and self._output is not None
        request = self._requests / f"{self._num_requests}.json"
        self._num_requests += 1
        _write(request, {"worker": worker, "directory": str(directory), "arguments": arguments})
        findings, end = directory / "findings.json", time.monotonic() + scale_seconds(timeout_s)
        while not findings.exists():
            if self._process.poll() is not None:
                problem = f"the ranks of {worker} ended with exit code {self._process.returncode}, and left no findings"
            elif time.monotonic() > end:
                problem = f"{worker} left no findings within {scale_seconds(timeout_s):.0f} s"
            else:
                time.sleep(0.05)
                continue
            self.close()
            raise _describe_failure(self._failures, problem, self._output)
        return json.loads(findings.read_text())

    @property
    def _requests(self) -> Path:
        return self._directory / f"requests-{self._num_starts}"

    def _restart(self) -> None:
        self._num_starts, self._num_requests = self._num_starts + 1, 0
        self._requests.mkdir()
        self._output = (self._requests / "output.txt").open("w+")
        worker = "distributed.serving_worker"
        self._failures = _folder_beside(self._output)
        arguments = str(self._requests), str(os.getpid())
        self._process = _start(worker, self._num_ranks, self._output, self._failures, *arguments)

    def close(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None


def _start(worker: str, num_ranks: int, output: IO[str], failures: Path, *arguments: str) -> subprocess.Popen[str]:
    command = supervisor_command([f"--ranks={num_ranks}"], [f"tests.{worker}", *arguments], forked.MODULE)
    command[1:1] = ["-W", "ignore"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    environment[nccl_rules.VARIABLE] = str(_folder_beside(output))
    environment[rank_failures.VARIABLE] = str(failures)
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and its ranks, which run in separate sessions. Otherwise they would use the cores of the next tests."""
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _folder_beside(output: IO[str]) -> Path:
    return Path(tempfile.mkdtemp(dir=Path(output.name).parent))


def _describe_failure(failures: Path, problem: str, output: IO[str]) -> AssertionError:
    """Return the error of a world: the exception of its first failing rank, or the end of the output if no rank raised."""
    if raised := rank_failures.find_first_failure(failures):
        return AssertionError(f"{raised}{problem}; its output is in {output.name}")
    output.seek(0)
    return AssertionError(f"{problem}\n{output.read()[-6000:]}")


def _write(path: Path, content: Any) -> None:
    """Write a file atomically, so that a reader never sees a part of it."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(content))
    unfinished.rename(path)
