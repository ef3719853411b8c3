"""The tracker ``wandb``."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from rlhf_mcore.observability.trackers import TrackedRun


class WandbTracker:
    """Weights & Biases. A resumed run continues the same W&B run. Repeated steps appear twice on the axis "step"."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            mode="offline" if run.offline else None,
            # By default wandb sends the command line, which may contain a password, source code, and git remotes.
            settings=wandb.Settings(
                silent=True, console="off", x_disable_meta=True, save_code=False, disable_code=True, disable_git=True
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()
