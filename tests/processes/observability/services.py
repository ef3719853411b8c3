"""Run a tracker with the package of its service, without a network, and read its files.

The packages can also be in the folder RLHF_MCORE_TRACKERS (``pip install --target``), because they require versions of other
packages that a training environment does not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from rlhf_mcore.config.choices import TRACKERS

FOLDER = os.environ.get("RLHF_MCORE_TRACKERS", "")
TRACK = """
import sys
sys.path.append({folder!r})
from pathlib import Path
from rlhf_mcore.observability.trackers import BackgroundTracker
from rlhf_mcore.observability.trackers import TrackedRun
for last_step, steps in ((None, (1, 2)), (2, (3,))):  # the second is resumed
    run = TrackedRun(Path({name!r}).absolute(), last_step, "ab" * 16, "math", "first", {{"seed": 7}}, offline=True)
    tracker = BackgroundTracker({name!r}, run, print)
    for step in steps:
        tracker.log(step, {{"reward/mean/a b(c)": step / 4, "loss/total": float("nan")}})
    tracker.close()
"""
RECORDS = """
import struct
from pathlib import Path

def records(data):  # of a log in LevelDB's format, after its own header: blocks of 32 KiB, records with 7 bytes before them
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""
"""
NAME = "reward/mean/a b(c)"
POINTS = [(NAME, 1, 0.25), (NAME, 2, 0.5), (NAME, 3, 0.75)]


def check_service(name: str, read: str, expected: str, tmp_path: Path) -> None:
    """Track a run and its continuation. The program ``read`` must print ``expected`` from the files of the service."""
    if PathFinder.find_spec(package := TRACKERS[name], [*sys.path, FOLDER]) is None:
        pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "local")}
    for key in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        environment.pop(key, None)
    path = f"import sys; sys.path.append({FOLDER!r})\n"
    done = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        for code in (TRACK.format(folder=FOLDER, name=name), path + read)
    ]
    assert "warning: the tracker" not in done[0].stdout and done[0].returncode == 0, done[0].stdout + done[0].stderr
    assert done[1].stdout.strip().splitlines()[-1:] == [expected], done[1].stdout + done[1].stderr
