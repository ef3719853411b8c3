"""The tracker ``trackio``."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from rlhf_mcore.observability.trackers import TrackedRun


class TrackioTracker:
    """Write metrics for ``trackio show`` on this machine, to TRACKIO_DIR or otherwise Trackio's cache."""

    def __init__(self, run: TrackedRun) -> None:
        name = f"{run.experiment}-{run.id[:6]}"
        self._run = trackio.init(project=run.project, name=name, resume="allow", config=dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
