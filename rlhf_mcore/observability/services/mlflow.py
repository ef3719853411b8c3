"""The tracker ``mlflow``."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric

from rlhf_mcore.observability.trackers import TrackedRun


class MlflowTracker:
    """MLflow: the server in MLFLOW_TRACKING_URI, else ``mlflow/mlflow.db`` in the run's directory. A tag identifies the run."""

    def __init__(self, run: TrackedRun) -> None:
        logging.getLogger("alembic").setLevel(logging.ERROR)  # it logs each table of a new database
        if not (address := os.environ.get("MLFLOW_TRACKING_URI")):
            run.directory.mkdir(exist_ok=True)
            address = f"sqlite:///{run.directory.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(run.project)
        if runs := self._client.search_runs([place], f"tags.`rlhf_mcore.run` = '{run.id}'"):
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"rlhf_mcore.run": run.id}
            self._id = self._client.create_run(place, run_name=run.experiment, tags=tags).info.run_id
            for key, value in run.config.items():
                self._client.log_param(self._id, re.sub(r"[^\w\-. /]", "_", key), str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        values = [Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)
