"""Trackers with the real packages of their services, offline."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rlhf_mcore.config.choices import TRACKERS
from tests.processes.observability.services import POINTS, RECORDS, check_service

READ = {
    "trackio": """
import sqlite3, json
from pathlib import Path
(file,) = Path("local").glob("math.db")
rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step")
print([(name, step, json.loads(text)["reward/mean/a b(c)"]) for name, step, text in rows])
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
EXPECTED = {
    "trackio": "[('first-ababab', 1, 0.25), ('first-ababab', 2, 0.5), ('first-ababab', 3, 0.75)]",
    "swanlab": f"{[('math', 'first', ('ab' * 16)[:21]), *POINTS]} 1",
    "comet": str([("math", "ab" * 16, "get_or_create"), ("seed", 7), *POINTS]),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_run_and_its_continuation_are_one_run_of_the_service(name: str, tmp_path: Path) -> None:
    check_service(name, READ[name], EXPECTED[name], tmp_path)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_entry_point_names_the_class(name: str) -> None:
    (point,) = entry_points(group="rlhf_mcore.trackers", name=name)
    pytest.importorskip(TRACKERS[name])
    assert {"log", "close"} <= vars(point.load()).keys()
