"""Trackers with the packages that they are made for, without a network: offline modes, MLflow's file, Trackio on this machine.

The packages are looked for in RLHF_MCORE_TRACKERS too, a folder that ``pip install --target`` has made: they bring versions of others
that an environment for training does not have.
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
from rlhf_mcore.observability.background_tracker import BackgroundTracker
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
READ = {
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///mlflow/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("math").experiment_id])
name = "reward/mean/a b_c_"
history = client.get_metric_history(run.info.run_id, name)
print(run.info.run_name, run.info.status, run.data.params, [(metric.step, metric.value) for metric in history])
""",
    "trackio": """
import sqlite3, json
from pathlib import Path
(file,) = Path("local").glob("math.db")
rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step")
print([(name, step, json.loads(text)["reward/mean/a b(c)"]) for name, step, text in rows])
""",
    "wandb": RECORDS
    + """
import json
from wandb.proto import wandb_internal_pb2

found = []
for file in sorted(Path("wandb").glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found.append((record.run.project, record.run.display_name, record.run.run_id))
        if record.HasField("environment"):  # the command line, git's remotes, the machine
            found.append("environment")
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["step"], items["reward/mean/a b(c)"]))
print(list(dict.fromkeys(found)))
""",
    "swanlab": RECORDS
    + """
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
found = []
for file in sorted(Path("swanlab").glob("run-*/*.swanlab"), key=lambda file: file.stat().st_mtime_ns):
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("start"):
            found.append((record.start.project, record.start.name, record.start.id))
        if record.HasField("scalar"):
            found.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
        found += ["printed"] * record.HasField("log")
print(list(dict.fromkeys(found)), (file.parent / "files" / "config.yaml").read_text().count("seed"))
""",
    "comet": """
import json, zipfile
from pathlib import Path
found = []
for file in sorted(Path("comet").glob("*.zip"), key=lambda file: file.stat().st_mtime_ns):
    with zipfile.ZipFile(file) as archive:
        held = json.loads(archive.read("experiment.json"))
        found.append((held["project_name"], held["offline_id"], held["resume_strategy"]))
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            metric, parameter = (message["payload"].get(name) for name in ("metric", "param"))
            if metric and not metric["metricName"].startswith(("sys.", "process ")):
                found.append((metric["metricName"], metric["step"], metric["metricValue"]))
            if parameter and parameter["source"] != "auto-logged":
                found.append((parameter["paramName"], parameter["paramValue"]))
            if message["type"] in ("standard_output", "file_upload", "file_name", "git_metadata"):
                found.append(message["type"])
print(list(dict.fromkeys(found)))
""",
}
NAME = "reward/mean/a b(c)"
POINTS = [(NAME, 1, 0.25), (NAME, 2, 0.5), (NAME, 3, 0.75)]
EXPECTED = {
    "mlflow": "first FINISHED {'seed': '7'} [(1, 0.25), (2, 0.5), (3, 0.75)]",
    "trackio": "[('first-ababab', 1, 0.25), ('first-ababab', 2, 0.5), ('first-ababab', 3, 0.75)]",
    "wandb": str([("math", "first", "ab" * 16), (1, 0.25), (2, 0.5), (3, 0.75)]),
    "swanlab": f"{[('math', 'first', ('ab' * 16)[:21]), *POINTS]} 1",
    "comet": str([("math", "ab" * 16, "get_or_create"), ("seed", 7), *POINTS]),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_run_and_its_continuation_are_one_run_of_the_service(name: str, tmp_path: Path) -> None:
    if PathFinder.find_spec(package := TRACKERS[name].package, [*sys.path, FOLDER]) is None:
        pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "local")}
    for key in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        environment.pop(key, None)
    path = f"import sys; sys.path.append({FOLDER!r})\n"
    done = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        for code in (TRACK.format(folder=FOLDER, name=name), path + READ[name])
    ]
    assert "warning: the tracker" not in done[0].stdout and done[0].returncode == 0, done[0].stdout + done[0].stderr
    assert done[1].stdout.strip().splitlines()[-1:] == [EXPECTED[name]], done[1].stdout + done[1].stderr
