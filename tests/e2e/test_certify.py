"""A certificate of one family on two ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mcore.commands.certify.command import FP32_LIMIT
from tests.commands import descendants, environment, left_behind, processes_with, started


@pytest.mark.timeout(900)
def test_a_dense_family_is_certified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "certify", "--quick", "--families", "llama"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "certificate.json").read_text())
    rows = document["families"]["llama"]
    assert [row["layout"] for row in rows] == ["tp1", "cp2"]
    for row in rows:
        assert 0 < max(row["trainer"], row["rollout"], row["agreement"]) < FP32_LIMIT
        assert row["gradient"] < 1e-5
        assert (row["sync"], row["saved"]) == ("equal", "equal")
    assert rows[0]["sleep"].startswith("equal")
    assert document["resume"]["verdict"] == "equal after 4 steps"
    assert document["names"].endswith("all are there")
    assert (tmp_path / "certificate.md").read_text().count("| ok |") == 2


def test_a_signal_ends_all_ranks_and_begins_no_other_family(tmp_path: Path) -> None:
    number = signal.SIGINT
    command = [
        sys.executable,
        "-m",
        "rlhf_mcore.cli.main",
        "certify",
        "--quick",
        "--families",
        "llama,olmo2",
        "--out",
        "out",
    ]
    own = environment(tmp_path)
    with started(command, tmp_path, own) as certify:
        certify.wait_for(
            lambda: sum(_name_of(pid).startswith("rank ") for pid in descendants(certify.process.pid)) == 2
        )
        certify.process.send_signal(number)
        printed = certify.end(60)
    assert certify.process.returncode == 128 + number, printed
    assert "Traceback" not in printed and "agree" not in printed
    assert processes_with("TMPDIR", own["TMPDIR"]) == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["llama"]
    assert left_behind(tmp_path) == []


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
    except OSError:  # it has just ended
        return ""
