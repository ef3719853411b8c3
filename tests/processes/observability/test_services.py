"""Weights & Biases and MLflow with their packages, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.observability.services import RECORDS, check_service

READ = {
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///mlflow/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("math").experiment_id])
name = "reward/mean/a b_c_"
history = client.get_metric_history(run.info.run_id, name)
print(run.info.run_name, run.info.status, run.data.params, [(metric.step, metric.value) for metric in history])
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
}
EXPECTED = {
    "mlflow": "first FINISHED {'seed': '7'} [(1, 0.25), (2, 0.5), (3, 0.75)]",
    "wandb": str([("math", "first", "ab" * 16), (1, 0.25), (2, 0.5), (3, 0.75)]),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_run_and_its_continuation_are_one_run_of_the_service(name: str, tmp_path: Path) -> None:
    check_service(name, READ[name], EXPECTED[name], tmp_path)
