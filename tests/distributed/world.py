"""Starting a torchrun world once for many tests: a worker script runs every check and leaves a JSON file of findings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import descendants

ROOT = Path(__file__).resolve().parents[2]


def run_world(script: str, num_ranks: int, directory: Path, *arguments: str, timeout_s: int = 500) -> Any:
    """Run ``tests/distributed/<script>`` on ``num_ranks`` processes and return what its first rank wrote to findings.json."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    command += [str(ROOT / "tests" / "distributed" / script), str(directory), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        # Ranks that outlive their launcher would take the cores from the next tests. They have sessions of their own.
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]
    return json.loads((directory / "findings.json").read_text())
