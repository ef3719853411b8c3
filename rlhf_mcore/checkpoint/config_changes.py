"""Compare a checkpoint's configuration with the configuration of the run that resumes from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import ADVANTAGES, RL
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import translate
from rlhf_mcore.config.keys import DESCRIPTIONS, leaves
from rlhf_mcore.config.schema import Config, RuleConfig
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.config.settings import load_yaml

# A resumed run with another value would be neither the old run nor a new run.
FIXED = frozenset(name for name, description in DESCRIPTIONS.items() if description.is_fixed)
# Values for releases before the key existed, if they differ from the key's default.
_BEFORE_THE_KEY = {
    "data.apply_chat_template": "false",
    "algorithm.bootstrap_truncated": True,
    "algorithm.kl.clip": None,
}
_STEPS = "trainer.num_steps"
_LENGTHS = (".optimizer.schedule.total_updates", ".kl.controller.steps")  # derived from _STEPS by default
# Settings for saving, display and resuming may change at any time.
FREE = ("output_dir", "project", "experiment", "checkpoint.", "logging.")


def compare_configs(saved: str, current: str, by_content: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Compare two configurations in YAML. Return (changed fixed keys, other changed keys), with one line per key.

    The saved configuration may be older than a key. The key counts as changed if its value differs from the old
    behaviour. ``by_content`` contains keys of files that are compared by their contents; their paths may change.

    Raises:
        ConfigError: the saved text is not a configuration.
    """
    before, now = {**_default_values(), **_BEFORE_THE_KEY}, _keys_of_today(current)
    before = {key: value for key, value in before.items() if key in now} | _keys_of_today(saved)
    for tree in (before, now):  # an older release's rules lack new options, which get their defaults
        if isinstance(rules := tree.get("reward.rules"), list):
            tree["reward.rules"] = [
                {**to_dict(RuleConfig()), **rule} if isinstance(rule, dict) else rule for rule in rules
            ]
    free = FREE if _has_critic(before) or _has_critic(now) else (*FREE, "critic.")
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and not key.startswith(free)]
    changed = [key for key in changed if not _follows(key, before, now)]
    lines = {key: f"{key} was {_show(before, key)} and is {_show(now, key)}" for key in changed}
    fixed = [key for key in changed if key in FIXED and key not in by_content]
    return [lines[key] for key in fixed], [lines[key] for key in changed if key not in fixed]


def _keys_of_today(text: str) -> dict[str, Any]:
    """Read the keys and values of a configuration. A former key stays if it has no replacement."""
    values = dict(leaves(_read(text)))
    for found in translate(values):
        for key in found.was:
            if found.now or key not in found.changed:
                del values[key]
        values |= leaves(found.now)
    return values


def _follows(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a value has changed by the same factor as ``trainer.num_steps``."""
    try:
        return key.endswith(_LENGTHS) and before[key] * now[_STEPS] == now[key] * before[_STEPS]
    except (KeyError, TypeError):  # a key is missing, or its value is not a number
        return False


def _has_critic(tree: dict[str, Any]) -> bool:
    """Return whether such a run builds a critic (``questions.needs_critic``).

    Without a critic, its derived keys are not compared.
    """
    setting, estimator = tree.get("algorithm.use_critic"), ADVANTAGES.get(str(tree.get("algorithm.advantage")))
    return setting == "true" or (setting == "auto" and estimator is not None and estimator.needs_values)


def further_models(saved: str) -> list[str]:
    """List the models in a checkpoint of a configuration (in YAML), in addition to the actor.

    These are a critic, a refreshed reference, and an averaged teacher.

    Raises:
        ConfigError: the text is not a configuration.
    """
    tree = {**_default_values(), **dict(leaves(_read(saved)))}
    refreshed = tree["algorithm.kl.coef"] and tree["reference.refresh_steps"]
    models = {"critic": _has_critic(tree), "reference": refreshed, "teacher": tree["teacher.weights"] == "average"}
    return [name for name, is_saved in models.items() if is_saved] if tree["algorithm.kind"] == RL.name else []


@cache
def _default_values() -> Mapping[str, Any]:
    return dict(leaves(to_dict(Config())))


def refuse(checkpoint: Path, fixed: list[str]) -> None:
    """Raise an error if fixed keys have changed.

    Raises:
        ConfigError: with each key, its old value and its new value.
    """
    if fixed:
        raise ConfigError.many(
            [f"{line}; restore it, or start a new experiment (checkpoint: {checkpoint})" for line in fixed]
        )


@lru_cache(maxsize=4)
def _read(text: str) -> Any:
    """Parse a configuration.

    The result is cached and must not be changed, because a resuming run parses the same text repeatedly.
    """
    try:
        tree = load_yaml(text, "config.yaml of the checkpoint")
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another checkpoint") from error
    if not isinstance(tree, dict):
        raise ConfigError("config.yaml of the checkpoint is not a configuration; choose another checkpoint")
    return tree


def _show(tree: dict[str, Any], key: str) -> str:
    return repr(tree[key]) if key in tree else "not there"
