"""Find where a run begins: at its first step, or after the newest checkpoint that is intact."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import recover
from rlhf_mcore.checkpoint.layout import linked_checkpoints, scan, without_manifest
from rlhf_mcore.checkpoint.links import best_rule
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.config.schema.run import AUTO, NEVER
from rlhf_mcore.trainer.inputs import Inputs
from rlhf_mcore.trainer.run_state import CheckSaved, Start


def find_start(
    run: Path,
    cfg: CheckpointConfig,
    config_yaml: str,
    inputs: Inputs | None = None,
    check_saved: CheckSaved | None = None,
    disk: Disk | None = None,
) -> Start:
    """Clean up a run directory and choose the checkpoint to continue from. For one process, which holds the directory's lock.

    ``inputs``: fingerprints of what the run is made from, as its configuration names it. ``check_saved`` raises
    ConfigError for a checkpoint whose files are those of its manifest and hold what no run can have saved.

    Raises:
        ConfigError: a checkpoint was asked for and is damaged, none of several is intact, or the configuration, or the content of
            an input, has changed in what cannot be changed.
    """
    inputs = inputs or {}
    disk = disk or Disk()
    _refuse_linked(run)
    notes = recover(run, best_rule(cfg), disk)
    own = scan(run)
    if cfg.resume == NEVER:
        if own:  # checkpoints of two runs in one directory could not be told apart
            raise ConfigError(
                f"checkpoint.resume={NEVER!r}, but {run} holds {len(own)} checkpoints of an earlier run; choose another "
                "experiment, or move them away"
            )
        return Start(notes=notes, inputs=inputs)
    if cfg.resume == AUTO and not own and not without_manifest(run):
        return Start(notes=notes, inputs=inputs)
    from rlhf_mcore.trainer.earlier_checkpoint import continue_run  # a run that begins reads no checkpoint

    return continue_run(run, cfg, config_yaml, inputs, check_saved, disk, notes)


def _refuse_linked(run: Path) -> None:
    """Refuse checkpoints that are links: none is passed over, or cleared away with what it names."""
    if links := linked_checkpoints(run):
        raise ConfigError.many(
            [
                f"{path} is a link to {path.readlink()}, and a run uses directories of its own only; move the checkpoint here, or go "
                f"on from it in another experiment (checkpoint.resume={os.path.realpath(path)})"
                for path in links
            ]
        )
