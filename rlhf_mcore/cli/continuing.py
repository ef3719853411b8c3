"""Decide whether a run that has begun before goes on, and say so: for the starter, and for ranks without one."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.links import best_rule, find_best
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.observability.files import keep_steps
from rlhf_mcore.observability.run_directory import MAX_METRICS_BYTES, METRICS
from rlhf_mcore.own_files import shown_path


def is_over(cfg: Config, run: Path, step: int) -> bool:
    """Tell whether nothing is left to do after ``step``, that of the newest checkpoint.

    A run that ends with its best model (``checkpoint.load_best_model_at_end``) has to evaluate it after its last step.
    """
    if step != cfg.trainer.num_steps or not cfg.checkpoint.load_best_model_at_end:
        return step >= cfg.trainer.num_steps
    rule = best_rule(cfg.checkpoint)
    best = find_best(scan(run), rule) if rule is not None else None
    if best is None or best.step == step:
        return True
    metrics = run / METRICS
    data = read_bytes(metrics, limit=MAX_METRICS_BYTES, remedy="move it away") if metrics.is_file() else b""
    lines = keep_steps(data, step).splitlines()
    return any(json.loads(line).get("final/step") == best.step for line in lines)


def continues_text(cfg: Config, checkpoint: Path, step: int) -> str:
    """Say that a run which has begun before goes on."""
    where = f"step {step} of {cfg.trainer.num_steps}" if step < cfg.trainer.num_steps else "its last step"
    return f"the run continues after {where}, from {shown_path(checkpoint)}"


def finished_text(cfg: Config, checkpoint: Path, step: int) -> str:
    """Say that a run is done, where it is started again."""
    return (
        f"this run is finished: {step} steps were made, and trainer.num_steps={cfg.trainer.num_steps}\n"
        f"trained model   {shown_path(checkpoint / run_kind(cfg).saved_as)}\n"
        "raise trainer.num_steps (or num_epochs) to train on, or choose another experiment"
    )
