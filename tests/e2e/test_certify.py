"""A certificate of one family on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mcore.commands.certify.command import FP32_LIMIT


@pytest.mark.slow
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
