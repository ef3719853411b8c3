"""The doctor among real ranks, started by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_traffic_between_ranks_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "doctor", "--quick", "--ranks", "2", "--json"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    traffic = found["gloo, 2 ranks"]
    assert traffic["severity"] == "ok" and "GB/s" in traffic["found"], done.stderr
    assert found["clocks of the ranks"]["severity"] == "ok"  # one machine has one clock
