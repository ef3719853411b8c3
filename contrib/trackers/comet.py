"""The tracker ``comet``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import comet_ml

from rlhf_mcore.observability.trackers import TrackedRun


class CometTracker:
    """Send metrics to Comet, or write an archive to the run directory for ``comet upload``."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(exist_ok=True)
        logging.getLogger("comet_ml").setLevel(logging.WARNING)  # its summary would overwrite the progress display
        # Comet would also send source code, the command line, printed output and git state.
        names = ["log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"]
        names += ["auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_log_co2"]
        settings = comet_ml.ExperimentConfig(
            offline_directory=str(run.directory),
            name=run.experiment,
            display_summary_level=0,
            **dict.fromkeys(names, False),
        )
        self._run = comet_ml.start(
            project_name=run.project,
            experiment_key=run.id,
            mode="get_or_create",
            online=not run.offline,
            experiment_config=settings,
        )
        self._run.log_parameters(dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._run.end()
