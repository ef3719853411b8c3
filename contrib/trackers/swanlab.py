"""The tracker ``swanlab``."""

from __future__ import annotations

from collections.abc import Mapping

import swanlab

from rlhf_mcore.observability.trackers import TrackedRun


class SwanlabTracker:
    """Send metrics to SwanLab, or write its log to the run directory for ``swanlab sync``."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(exist_ok=True)
        # SwanLab must not prompt for a key, nor record printed output or the command line.
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
