"""What has to hold among the keys of ``checkpoint``, and the time limit that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from os.path import isfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig, Config

AUTO = "auto"
NEVER = "never"
PRIVATE = "private"
MODES = ("0600", "0640", "0644", "0660", "0664")
SLURM_END = "SLURM_JOB_END_TIME"

_MINUTES = re.compile(r"\d+(\.\d+)?")
_METRIC = re.compile(r"evaluate/\S+")


def octal_mode(text: str) -> int | None:
    """The file mode that a user means, None if it is none of ``MODES``. YAML takes 0640 without quotes for the number 416."""
    return next((int(mode, 8) for mode in MODES if text in (mode, str(int(mode, 8)))), None)


def checkpoint_problems(cfg: Config) -> Iterator[str]:
    """Problems with ``cfg.checkpoint`` that a look at one key does not show."""
    checkpoint = cfg.checkpoint
    yield from _metric_problems(cfg)
    yield from _retention_problems(checkpoint)
    if checkpoint.mode not in (None, PRIVATE) and octal_mode(checkpoint.mode) is None:
        yield f"checkpoint.mode={checkpoint.mode!r} is not a choice; choose one of: null, {PRIVATE}, {', '.join(MODES)}"
    if wrong := [step for step in checkpoint.keep if step < 1]:
        yield f"checkpoint.keep={checkpoint.keep}: {wrong[0]} is no step; name steps from 1 on"
    yield from _resume_problems(checkpoint)
    if checkpoint.save_by is not None:
        try:
            time_left(checkpoint.save_by, 0.0, {})
        except ConfigError as error:
            yield str(error)


def time_left(save_by: str | None, now: float, environment: Mapping[str, str]) -> float | None:
    """Seconds from ``now`` until the job will be ended; None: nobody knows.

    Args:
        save_by: the key's value: minutes from now, a time in ISO 8601 (local unless it names a zone), ``auto`` or None.
        now: the wall clock when the job was started, in seconds since the epoch.
        environment: where ``auto`` finds SLURM's end of the job.

    Raises:
        ConfigError: ``save_by`` is none of these.
    """
    if save_by is None:
        return None
    if save_by == AUTO:
        end = environment.get(SLURM_END, "")
        return float(end) - now if end.isdecimal() else None
    if _MINUTES.fullmatch(save_by):
        return 60 * float(save_by)
    try:
        return datetime.fromisoformat(save_by).timestamp() - now
    except ValueError:
        raise ConfigError(
            f"checkpoint.save_by={save_by!r} is no time; give minutes from the start, a time like 2026-01-01T00:00, "
            f"auto ({SLURM_END} where it is set) or null"
        ) from None


def _metric_problems(cfg: Config) -> Iterator[str]:
    metric = cfg.checkpoint.metric_for_best_model
    if metric is None:
        if cfg.checkpoint.load_best_model_at_end:
            yield (
                "checkpoint.load_best_model_at_end=True, but checkpoint.metric_for_best_model=null: no metric decides which "
                "model is the best; name one, evaluate/accuracy for example"
            )
        return
    if not _METRIC.fullmatch(metric):
        yield (
            f"checkpoint.metric_for_best_model={metric!r} is no metric of the evaluation; name one, evaluate/accuracy or "
            "evaluate/reward for example"
        )
    if not cfg.data.eval:
        yield f"checkpoint.metric_for_best_model={metric!r} needs held-out prompts, but data.eval=[]; name files in data.eval"


def _retention_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    if checkpoint.save_total_limit is not None:
        return
    if checkpoint.archive:
        yield (
            "checkpoint.archive=True puts away what retention drops, but checkpoint.save_total_limit=null keeps everything; "
            "set save_total_limit"
        )
    if checkpoint.keep_every is not None:
        yield (
            f"checkpoint.keep_every={checkpoint.keep_every} keeps more than save_total_limit does, but "
            "checkpoint.save_total_limit=null keeps everything; set save_total_limit"
        )


def _resume_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    resume = checkpoint.resume
    if resume in (AUTO, NEVER):
        return
    if not isfile(Path(resume) / "manifest.json"):
        yield (
            f"checkpoint.resume={resume!r} is neither auto, never nor a directory with a checkpoint (it has a manifest.json); "
            "choose one of them"
        )
