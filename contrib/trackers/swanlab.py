"""The tracker ``swanlab``."""

from __future__ import annotations

from collections.abc import Mapping

import swanlab

from rlhf_mcore.observability.trackers import TrackedRun


class SwanlabTracker:
    """SwanLab, or its log in the run's directory that ``swanlab sync`` brings there."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(exist_ok=True)
        # It asks nobody for a key, and reads neither what is printed nor the command line.
        terminal, probe = swanlab.Settings.Terminal(proxy_type="none"), swanlab.Settings.Probe(runtime=False, git=False)
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=run.id[:21],
            resume="allow",
            log_dir=str(run.directory),
            config=dict(run.config),
            mode="offline" if run.offline else "online",
            settings=swanlab.Settings(interactive=False, terminal=terminal, probe=probe),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
