"""A certificate of one family on two ranks, and the archive for a machine without an installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.machine_speed import scale_seconds
from tools.certify.__main__ import pack
from tools.certify.layouts import FP32_LIMIT


@pytest.mark.timeout(900)
def test_a_dense_family_is_certified(tmp_path: Path) -> None:
    parts = ["--only", "families", "resume", "names"]
    command = [sys.executable, "-m", "tools.certify", "--quick", "--families", "llama", *parts, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "certificate.json").read_text())
    rows = document["families"]["llama"]
    assert [row["layout"] for row in rows] == ["tp1", "cp2"]
    for row in rows:
        assert 0 < max(row["trainer"], row["rollout"], row["agreement"]) < FP32_LIMIT
        assert row["gradient"] < 1e-5
        assert (row["sync"], row["saved"]) == ("equal", "equal")
    assert rows[0]["sleep"].startswith("equal")
    for part in ("resume", "names"):
        assert [cells[3] for cells in document["parts"][part]] == ["ok"] * len(document["parts"][part])


def test_parts_run_from_the_archive(tmp_path: Path) -> None:
    assert pack(tmp_path / "certify.tar.gz") == 0
    with tarfile.open(tmp_path / "certify.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = [
        sys.executable,
        "-m",
        "tools.certify",
        "--only",
        "mfu",
        "host_syncs",
        "--device",
        "cpu",
        "--out",
        "found",
    ]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path / "certify", env=environment, capture_output=True, text=True, timeout=scale_seconds(200)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "certify" / "found" / "certificate.md").read_text()
    assert "| host_syncs | host syncs of an update | skipped: a CPU has none | - | - |" in page
