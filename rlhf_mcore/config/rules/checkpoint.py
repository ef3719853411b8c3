"""Check the keys of ``checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isfile
from pathlib import Path

from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import AUTO, NEVER
from rlhf_mcore.plugins import missing_plugin

# Arguments of ``load_plugin``.
DELTAS = ("checkpoint_hooks", "deltas", "checkpoint.deltas")
ARCHIVE = ("checkpoint_hooks", "archive", "checkpoint.archive=true")


def checkpoint_problems(cfg: Config) -> Iterator[str]:
    """List problems between the keys of ``checkpoint``, and with their files and plug-ins."""
    checkpoint, metric = cfg.checkpoint, cfg.checkpoint.metric_for_best_model
    if metric is not None and not cfg.data.eval:
        yield f"checkpoint.metric_for_best_model={metric!r} needs held-out prompts, but data.eval=[]; name files in data.eval"
    for is_used, plugin in ((checkpoint.deltas, DELTAS), (checkpoint.archive, ARCHIVE)):
        if is_used and (problem := missing_plugin(*plugin)) is not None:
            yield problem
    resume = checkpoint.resume
    if resume not in (AUTO, NEVER) and not isfile(Path(resume) / "manifest.json"):
        yield f"checkpoint.resume={resume!r} is not a checkpoint directory (with a manifest.json); choose one, or {AUTO} or {NEVER}"
