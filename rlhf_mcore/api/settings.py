"""Configurations without YAML: of a dict, of keywords, and changes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from rlhf_mcore.api.arguments import checked_flag, checked_list, checked_path, refusal, shown
from rlhf_mcore.config import load, schema
from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group, leaves, table_of, value_of
from rlhf_mcore.config.other_names import hint
from rlhf_mcore.config.show import redact
from rlhf_mcore.foreign import shorten

_SHORT = {"algorithm": "algorithm.preset", "model": "model.path"}  # for a text in the place of a group


class Config(schema.Config):
    """A configuration: ``rm.Config(model="my-model", algorithm="grpo", trainer={"num_steps": 5})``.

    Takes a dict of settings, or keywords, or both (which win): names of groups with dicts, or dotted keys
    (``rm.Config({"actor.optimizer.lr": 1e-6})``). Keys are those of docs/configuration.md. ``cfg.a.b = value`` sets one later.

    Raises:
        ConfigError: naming every unknown key and every value of another type.
    """

    def __init__(self, settings: Any = None, /, **keys: Any) -> None:
        if settings is not None and not isinstance(settings, Mapping):
            remedy = "give a dict of settings; a file is read by rm.load_config(path)"
            raise refusal("settings", settings, remedy)
        vars(self).update(vars(schema.Config()))
        apply_settings(self, {**(settings or {}), **keys}, is_new=True)

    def __repr__(self) -> str:
        """Show the keys that differ from the defaults, without secrets."""
        defaults = dict(leaves(asdict(schema.Config())))
        values = dict(leaves(redact(asdict(self))))
        return f"Config({', '.join(f'{key}={value!r}' for key, value in values.items() if value != defaults.get(key))})"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration from a YAML file. Keys that are null for "derived" stay null.

    Args:
        path: of the file.
        overrides: further settings, ["a.b=c", ...], as on a command line.
        without_model: ``model.path`` need not be set, and is "none" then.

    Raises:
        ConfigError: all unknown keys, values of another type, references that do not resolve and missing values, at once.
    """
    file, texts = (
        checked_path("path", path),
        checked_list("overrides", overrides, "texts such as 'trainer.num_steps=5'"),
    )
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise refusal("overrides", wrong[0], "give a list of texts such as 'trainer.num_steps=5'")
    loaded = load.load_config(file, texts, without_model=checked_flag("without_model", without_model))
    cfg = Config.__new__(Config)
    vars(cfg).update(vars(loaded))
    return cfg


def apply_settings(cfg: schema.Config, settings: Mapping[str, Any], *, is_new: bool = False) -> None:
    """Set keys, as assignments do. ``is_new``: a preset fills in the keys that are not among them.

    Raises:
        ConfigError: naming every unknown key and every value of another type.
    """
    problems: list[str] = []
    given = dict(_flatten(settings, problems))
    if is_new:
        preset = given.get("algorithm.preset", cfg.algorithm.preset)
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(f"algorithm={shown(preset)} is unknown; choose one of: {', '.join(PRESETS)}")
        given = {
            "algorithm.preset": preset,
            **{f"algorithm.{name}": value for name, value in PRESETS[preset].items()},
            **given,
        }
        vars(cfg.algorithm)["preset"] = preset
    for key, value in given.items():
        try:
            _assign(cfg, key, value)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError.many(problems)


def _flatten(settings: Mapping[Any, Any], problems: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. A group may be a dict, or stand for one of its keys."""
    for name, value in settings.items():
        if not isinstance(name, str):
            problems.append(f"{prefix}{shown(name)} is no key; keys are texts, such as 'trainer.num_steps'")
            continue
        key = prefix + name
        if key in _SHORT and isinstance(value, str | os.PathLike):
            yield _SHORT[key], value
        elif key in KEYS and is_group(key) and isinstance(value, Mapping):
            yield from _flatten(value, problems, f"{key}.")
        elif key not in KEYS and table_of(key) is None:
            problems.append(
                f"unknown key {shorten(key, 100)}; {hint(key[:100], holds_keys=isinstance(value, Mapping))}"
            )
        else:
            yield key, value


def _assign(cfg: schema.Config, key: str, value: Any) -> None:
    if (table := table_of(key)) is not None:  # a name of the user's own, as in actor.megatron.bucket_size
        for name in reversed(key[len(table) + 1 :].split(".")):
            value = {name: value}
        key, value = table, {**(value_of(cfg, table) or {}), **value}
    group, _, name = key.rpartition(".")
    owner = value_of(cfg, group) if group else cfg
    if is_group(key) and is_dataclass(value) and isinstance(value, KEYS[key]):
        vars(owner)[name] = value
    else:
        setattr(owner, name, value)
