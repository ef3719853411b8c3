"""Check the keys of ``checkpoint``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import isfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig, Config
from rlhf_mcore.config.schema.run import AUTO, FILE_MODES, NEVER, PRIVATE, octal_mode, time_left
from rlhf_mcore.plugins import missing_plugin

# Arguments of ``load_plugin``.
DELTAS = ("checkpoint_hooks", "deltas", "checkpoint.deltas")
ARCHIVE = ("checkpoint_hooks", "archive", "checkpoint.archive=true")
_METRIC = re.compile(r"-?evaluate/\S+")


def checkpoint_problems(cfg: Config) -> Iterator[str]:
    """List problems between the keys of ``checkpoint``, and with their files and plug-ins."""
    checkpoint = cfg.checkpoint
    yield from _metric_problems(cfg)
    if checkpoint.archive and checkpoint.save_total_limit is None:
        yield (
            "checkpoint.archive=True archives dropped checkpoints, but checkpoint.save_total_limit=null drops none; "
            "set save_total_limit"
        )
    if checkpoint.mode not in (None, PRIVATE) and octal_mode(checkpoint.mode) is None:
        yield f"checkpoint.mode={checkpoint.mode!r} is not a choice; choose one of: null, {PRIVATE}, {', '.join(FILE_MODES)}"
    for is_used, plugin in ((checkpoint.deltas, DELTAS), (checkpoint.archive, ARCHIVE)):
        if is_used and (problem := missing_plugin(*plugin)) is not None:
            yield problem
    yield from _resume_problems(checkpoint)
    if checkpoint.save_by is not None:
        try:
            time_left(checkpoint.save_by, 0.0, {})
        except ConfigError as error:
            yield str(error)


def _metric_problems(cfg: Config) -> Iterator[str]:
    metric = cfg.checkpoint.metric_for_best_model
    if metric is None:
        if cfg.checkpoint.load_best_model_at_end:
            yield (
                "checkpoint.load_best_model_at_end=True, but checkpoint.metric_for_best_model=null: no metric selects "
                "the best model; set it, for example to evaluate/accuracy"
            )
        return
    if not _METRIC.fullmatch(metric):
        yield (
            f"checkpoint.metric_for_best_model={metric!r} is not an evaluation metric; choose one, for example "
            "evaluate/accuracy or evaluate/reward"
        )
    elif not cfg.data.eval:
        yield f"checkpoint.metric_for_best_model={metric!r} needs held-out prompts, but data.eval=[]; name files in data.eval"


def _resume_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    resume = checkpoint.resume
    if resume in (AUTO, NEVER):
        return
    if not isfile(Path(resume) / "manifest.json"):
        yield (
            f"checkpoint.resume={resume!r} is neither auto, never nor a checkpoint directory (with a manifest.json); "
            "choose one of them"
        )
