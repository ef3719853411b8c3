"""What has to hold among the keys of ``checkpoint``, the time limit that they name, and what may differ when a run resumes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache, lru_cache
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import ADVANTAGES
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import DESCRIPTIONS, leaves
from rlhf_mcore.config.run_kinds import RL
from rlhf_mcore.config.schema import CheckpointConfig, Config, RuleConfig
from rlhf_mcore.config.yaml_text import load_yaml

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
    """Seconds from ``now`` until the job will be ended; None: not known.

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


# ----------------------------------------------------------------- differences to the configuration that a checkpoint holds
# Continuing with another value would make a run that is neither the old one nor a new one.
FIXED = frozenset(name for name, description in DESCRIPTIONS.items() if description.is_fixed)
# What a release did that did not have the key yet, where that is not the key's default.
_BEFORE_THE_KEY = {
    "data.apply_chat_template": "false",
    "algorithm.bootstrap_truncated": True,
    "algorithm.kl.clip": None,
}
# How a run is saved, shown and resumed may change at any time.
FREE = ("output_dir", "project", "experiment", "checkpoint.", "logging.")


def compare_configs(saved: str, current: str, by_content: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """(what cannot be changed, what has changed otherwise) between two configurations in YAML, a line for each key.

    A key that the release which wrote the saved one did not have counts as changed where its value now is not what that release did.
    ``by_content``: keys that name files whose contents are compared; their paths may change.

    Raises:
        ConfigError: the saved one is no configuration.
    """
    before, now = {**_default_values(), **_BEFORE_THE_KEY}, dict(leaves(_read(current)))
    before = {key: value for key, value in before.items() if key in now} | dict(leaves(_read(saved)))
    for tree in (before, now):  # a rule that was saved by a release without some option has that option's default
        if isinstance(rules := tree.get("reward.rules"), list):
            tree["reward.rules"] = [
                {**asdict(RuleConfig()), **rule} if isinstance(rule, dict) else rule for rule in rules
            ]
    free = FREE if _has_critic(before) or _has_critic(now) else (*FREE, "critic.")
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and not key.startswith(free)]
    lines = {key: f"{key} was {_show(before, key)} and is {_show(now, key)}" for key in changed}
    fixed = [key for key in changed if key in FIXED and key not in by_content]
    return [lines[key] for key in fixed], [lines[key] for key in changed if key not in fixed]


def _has_critic(tree: dict[str, Any]) -> bool:
    """Whether such a run builds a critic (``derive.needs_critic``); without one its keys, which follow from others, do not count."""
    wanted, estimator = tree.get("algorithm.use_critic"), ADVANTAGES.get(str(tree.get("algorithm.advantage")))
    return wanted == "true" or (wanted == "auto" and estimator is not None and estimator.needs_values)


def further_models(saved: str) -> list[str]:
    """The models that a checkpoint of a configuration (in YAML) holds beside the actor: a critic, a reference that is refreshed.

    Raises:
        ConfigError: it is no configuration.
    """
    tree = {**_default_values(), **dict(leaves(_read(saved)))}
    refreshed = tree["algorithm.kl.coef"] and tree["reference.refresh_steps"]
    held = {"critic": _has_critic(tree), "reference": refreshed}
    return [name for name, is_held in held.items() if is_held] if tree["algorithm.kind"] == RL.name else []


@cache
def _default_values() -> Mapping[str, Any]:
    return dict(leaves(asdict(Config())))


def refuse(checkpoint: Path, fixed: list[str]) -> None:
    """Raise if something has changed that cannot be.

    Raises:
        ConfigError: naming each key, its old and its new value.
    """
    if fixed:
        raise ConfigError.many(
            [f"{line}; restore it, or start a new experiment (checkpoint: {checkpoint})" for line in fixed]
        )


@lru_cache(maxsize=4)
def _read(text: str) -> Any:
    """The tree of a configuration, which nobody changes. A run that resumes asks for the same texts several times."""
    try:
        tree = load_yaml(text, "config.yaml of the checkpoint")
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another checkpoint") from error
    if not isinstance(tree, dict):
        raise ConfigError("config.yaml of the checkpoint is no configuration; choose another checkpoint")
    return tree


def _show(tree: dict[str, Any], key: str) -> str:
    return repr(tree[key]) if key in tree else "not there"
