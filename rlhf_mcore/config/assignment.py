"""Explain mistakes in ``cfg.a.b = value``, and check values that were changed in place."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, item_type, type_name
from rlhf_mcore.config.other_names import hint as other_name
from rlhf_mcore.config.removed import REMOVED, warn_of
from rlhf_mcore.config.schema.group import types_of
from rlhf_mcore.foreign import shorten

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


def refuse(kind: type, name: str, value: Any) -> None:
    """Warn where a group no longer has such a key.

    Raises:
        ConfigError: it never had one, or takes no such value.
    """
    full = _key_of(kind, name)
    removed = [key for key in REMOVED if key == full or ("." in full and key.endswith(f".{full}"))]
    if not removed:
        raise ConfigError(assignment_problem(kind, name, value))
    warn_of(removed[0], value)


def assignment_problem(kind: type, name: str, value: Any) -> str:
    """Explain why a group takes no such value under this name."""
    key, hint = _key_of(kind, name), types_of(kind).get(name)
    if hint is None:
        close = get_close_matches(name, types_of(kind), n=1)
        advice = f"did you mean {_key_of(kind, close[0])}?" if close else other_name(key[:100])
        return f"unknown key {shorten(key, 100)}; {advice}"
    if is_dataclass(hint):
        other = (
            f"give a preset when the configuration is made: rm.Config(algorithm={value!r}), or algorithm={value} for load_config"
            if key == "algorithm" and isinstance(value, str) and value in PRESETS
            else f"set one of its keys: {', '.join(f'{key}.{item.name}' for item in fields(hint))}"
        )
        return f"{key}={_show_value(value)}: {key} is a group, not a value; {other}"
    if callable(value) and key.startswith("reward."):
        return f"{key}={_show_value(value)} is not valid; give a function itself as rm.train(cfg, reward=...)"
    return f"{key}={_show_value(value)} is not valid; expected {type_name(hint)}"


def check_types(cfg: Config) -> None:
    """Assign every value again: lists and tables may have been changed in place.

    Raises:
        ConfigError: naming each key whose value is of another type.
    """
    problems: list[str] = []
    _check_group(cfg, problems)
    if problems:
        raise ConfigError.many(problems)


def _check_group(group: Any, problems: list[str]) -> None:
    for item in fields(group):
        value = getattr(group, item.name)
        if is_dataclass(value):
            _check_group(value, problems)
            continue
        if isinstance(value, list):
            for member in filter(is_dataclass, value):
                _check_group(member, problems)
        try:
            setattr(group, item.name, value)
        except ConfigError as error:
            problems.append(str(error))


def _key_of(kind: type, name: str) -> str:
    """Return the dotted name, as far as a class tells: a layout may be the actor's or the critic's, and is "layout" then."""
    owners = [key for key, hint in KEYS.items() if hint is kind or item_type(hint) is kind]
    if not owners:
        return name
    owner = owners[0] if len(owners) == 1 else owners[0].rpartition(".")[2]
    return f"{owner}.{name}" if KEYS.get(owner) is kind or len(owners) > 1 else f"{owner}[].{name}"


def _show_value(value: Any) -> str:
    return shorten(repr(value), 200)
