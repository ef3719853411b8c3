"""All keys by dotted name, with types and descriptions, and the search for a misspelt key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlhf_mcore.config.engine_kinds import engines_that_read
from rlhf_mcore.config.schema.group import ENGINE, Description, Group, describe_keys, is_group_type, to_dict
from rlhf_mcore.config.schema.tree import Config
from rlhf_mcore.redaction import redact


def walk(group: type[Group], prefix: str = "") -> Iterator[tuple[str, Any, Description]]:
    """Yield (dotted name, type, description) for every key of a group, recursively. A group precedes its keys."""
    for name, (hint, description) in describe_keys(group).items():
        if description.only_with == ENGINE:
            description = replace(description, only_with=engines_that_read(prefix + name))
        elif description.only_with.startswith("."):
            description = replace(description, only_with=prefix + description.only_with[1:])
        yield prefix + name, hint, description
        if is_group_type(hint):
            yield from walk(hint, f"{prefix}{name}.")


KEYS: dict[str, Any] = {key: hint for key, hint, _ in walk(Config)}
"""The type of every key and group: {"actor.layout": LayoutConfig, "actor.layout.tp": int, ...}."""

DESCRIPTIONS: dict[str, Description] = {key: description for key, _, description in walk(Config)}
"""The description of every key and group."""


def choices_of(key: str) -> tuple[str, ...]:
    """Return the allowed texts of a key."""
    choices = DESCRIPTIONS[key].choices
    assert choices is not None, key
    return choices.names


def is_group(key: str) -> bool:
    """Return whether a known key contains further keys."""
    return is_group_type(KEYS[key])


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List the dotted keys and values of a nested configuration."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed_keys(cfg: Config) -> dict[str, Any]:
    """Return the values of the keys that differ from the defaults, without secrets."""
    defaults = dict(leaves(to_dict(Config())))
    return {key: value for key, value in leaves(redact(to_dict(cfg))) if value != defaults.get(key)}


def value_of(cfg: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def table_of(key: str) -> str | None:
    """Return the table of user-chosen names that contains ``key`` (``actor.megatron`` for ``actor.megatron.bucket_size``), or None."""
    while "." in key:
        key = key.rpartition(".")[0]
        if key in KEYS:
            return key if dict[str, Any] in get_args(KEYS[key]) else None
    return None


def item_type(hint: Any) -> Any:
    """Return the element type of a list type, or None for other types."""
    return get_args(hint)[0] if get_origin(hint) is list else None


def type_name(hint: Any) -> str:
    """Return a type as a text for users: "int", "int or null", "list of str"."""
    if get_origin(hint) is dict:
        return f"a table of names, each with a {type_name(get_args(hint)[1])}"
    if (item := item_type(hint)) is not None:
        inside = f"{{{', '.join(item.model_fields)}}}" if is_group_type(item) else type_name(item)
        return f"list of {inside.removesuffix(' or null')}"
    if hint is Any:
        return "plain value"
    if get_origin(hint) is Literal:
        return "str"
    if inner := [kind for kind in get_args(hint) if kind is not NoneType]:
        return " or ".join(map(type_name, inner)) + " or null" * (NoneType in get_args(hint))
    return "null" if hint is NoneType else str(hint.__name__)


def nearest(key: str, *, groups: bool = False) -> str | None:
    """Return the known key that a misspelt key most likely means, or None. ``groups``: also return groups.

    The whole dotted name is compared first. If no key is close, only its last part is compared: ``lr`` finds
    ``actor.optimizer.lr``. Among several keys with this last part, the key that shares the most groups is returned.
    """
    candidates = [name for name in KEYS if groups or not is_group(name)]
    *groups_of, last = key.split(".")
    for close in difflib.get_close_matches(key, candidates, n=5, cutoff=0.75):
        if (
            difflib.SequenceMatcher(None, last, close.rpartition(".")[2]).ratio() >= 0.6
        ):  # the last part must be similar too, not only the groups
            return close
    by_last = {name.rpartition(".")[2]: name for name in candidates}
    for similar in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75):
        same = [name for name in candidates if name.rpartition(".")[2] == similar]
        shared = {name: len(set(name.split(".")).intersection(groups_of)) for name in same}
        if (
            len(same) == 1 or not groups_of or any(shared.values())
        ):  # model.name means none of the groups that contain a name
            return max(same, key=lambda name: shared[name])
    return None
