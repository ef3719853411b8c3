"""From a file of another trainer to the text of a configuration of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS
from rlhf_mcore.config.migration import openrlhf, verl, verl_source
from rlhf_mcore.config.migration.shell import script_words
from rlhf_mcore.config.migration.table import Migration, apply
from rlhf_mcore.config.yaml_text import MAX_BYTES, load_yaml
from rlhf_mcore.foreign import read_text

SOURCES = ("verl", "openrlhf")


def migrate(path: Path, source: str = "auto") -> Migration:
    """Read a YAML file (verl) or a launch script (verl, OpenRLHF) and carry over what can be.

    Raises:
        ConfigError: the file cannot be read, or it is of neither.
    """
    text = read_text(path, limit=MAX_BYTES)
    if path.suffix in (".yaml", ".yml"):
        migration = apply(verl.TABLE, verl_source.read_tree(_tree(text, path)))
    else:
        migration = _of_script(text, path, source)
    _note(migration)
    return migration


def _tree(text: str, path: Path) -> dict[str, Any]:
    tree = load_yaml(text, str(path))
    if not isinstance(tree, dict) or not tree.keys() & set(verl_source.ROOTS) - {"data", "trainer", "algorithm"}:
        raise ConfigError(
            f"{path}: not a configuration of verl: it has none of the groups {', '.join(verl_source.ROOTS)}"
        )
    return tree


def _of_script(text: str, path: Path, source: str) -> Migration:
    words = script_words(text)
    overrides, flags = verl_source.read_overrides(words), openrlhf.read_flags(words)
    if source == "auto":
        source = "openrlhf" if any("openrlhf" in word for word in words) else "verl" if overrides else ""
    if source == "openrlhf" and flags:
        return apply(openrlhf.TABLE, flags)
    if source == "verl" and overrides:
        return apply(verl.TABLE, overrides)
    raise ConfigError(
        f"{path}: found neither overrides of verl (actor_rollout_ref.model.path=...) nor flags of OpenRLHF"
    )


def _note(migration: Migration) -> None:
    settings = migration.settings
    if "reward.model.path" in settings:
        migration.notes.append("reward.model: a *ForSequenceClassification directory with one label")
    elif "reward.function" not in settings:
        migration.notes.append("reward: not in the source as such; set reward.rules or reward.function")
    else:
        migration.notes.append("reward.function: called as f(data_source, solution_str, ground_truth, extra_info)")
    if "trainer.num_steps" not in settings:
        migration.notes.append("trainer.num_steps: there, it follows from epochs and rows; set it")
    model = str(settings.get("model.path", ""))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        migration.notes.append(f"model.path: {model} looks like the id of a model; download it and give its directory")
    if "model.path" not in settings:
        migration.notes.append("model.path: not in the source; set it to a Hugging Face directory")


def to_text(migration: Migration) -> str:
    """The configuration as YAML; what is lost and what is left to do stands above it as comments."""
    lines = [f"# Carried over from {migration.source} by rlhf-mcore migrate: {len(migration.carried)} keys."]
    if migration.notes:
        lines += ["#", "# To do:", *(f"#   {note}" for note in migration.notes)]
    if migration.lost:
        lines += ["#", f"# Not carried over, {len(migration.lost)} keys:"]
        lines += [f"#   {_one_line(key, value)}: {reason}" for key, (value, reason) in migration.lost.items()]
    body = yaml.safe_dump(_nested(migration.settings), sort_keys=False, allow_unicode=True, default_flow_style=False)
    return "\n".join([*lines, "", body])


def _one_line(key: str, value: Any) -> str:
    return " ".join(f"{key}={value}".split())


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in KEYS:  # in the order of the schema
        if key in settings:
            *groups, name = key.split(".")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[name] = settings[key]
    return tree
