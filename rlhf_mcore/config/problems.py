"""Convert pydantic's errors to messages with key, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import BY_KEY
from rlhf_mcore.config.keys import KEYS, item_type, type_name
from rlhf_mcore.config.other_names import hint as other_name
from rlhf_mcore.config.schema.group import CHOICE, Group, describe_keys, inner_types, is_group_type
from rlhf_mcore.foreign import shorten

_UNKNOWN = ("extra_forbidden", "no_such_attribute")
_CHOICES = (CHOICE, "literal_error")
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "predicate_failed")


def explain(kind: type[Group], error: ValidationError) -> ConfigError:
    """Build the error for unknown keys and invalid values of a group."""
    return ConfigError.many(list(problems_of(kind, error).values()))


def problems_of(
    kind: type[Group], error: ValidationError, place: Callable[[str], str] = lambda key: ""
) -> dict[str, str]:
    """Return a message for each invalid value, by key and position in a list (``reward.rules[1].weight``).

    Args:
        kind: the group that was read.
        error: pydantic's error.
        place: returns the file and line of a key, as the beginning of its message.
    """
    problems: dict[str, str] = {}
    for found in error.errors(include_url=False, include_context=False):
        where = _locate(kind, found["loc"])
        if where.written not in problems:
            problems[where.written] = place(where.key) + _problem(where, found["type"], found["input"])
    return problems


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a configuration.

    Attributes:
        written: the key with positions in lists.
        owner: the group that contains it.
        name: its name in ``owner``.
        hint: its type.
    """

    written: str
    owner: type[Group]
    name: str
    hint: Any

    @property
    def key(self) -> str:
        """The dotted key."""
        return self.written.partition("[")[0]


def _locate(kind: type[Group], loc: tuple[int | str, ...]) -> _Place:
    written, owner, name = prefix_of(kind), kind, ""
    hint: Any = kind
    for step in loc:
        if is_group_type(hint):
            owner, name = hint, str(step)
            hint, _ = describe_keys(owner).get(name, (None, None))
            written = f"{written}{'.' if written else ''}{name}"
            continue
        for inner in inner_types(hint):
            if get_origin(inner) is list and isinstance(step, int):
                written, hint = f"{written}[{step}]", get_args(inner)[0]
                break
            if get_origin(inner) is dict and step != "[key]":
                written, hint = f"{written}.{step}", get_args(inner)[1]
                break
    return _Place(written, owner, name, hint)


def _problem(where: _Place, error: str, value: Any) -> str:
    if error in _UNKNOWN:
        return f"unknown key {shorten(where.written, 100)}; {_remedy(where, value)}"
    shown, (hint, about) = f"{where.written}={show_value(value)}", describe_keys(where.owner)[where.name]
    if is_group_type(where.hint) and is_group_type(hint):
        names = ", ".join(f"{where.written}.{name}" for name in where.hint.model_fields)
        return f"{shown}: {where.written} is a group, not a value; set one of its keys: {names}"
    null = ", or null" * (inner_types(hint) != (hint,))
    if error in _CHOICES and about.choices is not None and not about.choices.names:
        return f"{shown} is not valid; give {about.choices}{null}"
    if error in _CHOICES and about.choices is not None:
        close = get_close_matches(str(value), about.choices.names, n=1)
        begin = f"did you mean {close[0]!r}? There are: " if close else "choose one of: "
        return f"{shown} is not a choice; {begin}{about.choices}{null}"
    if error in _RANGES:
        return f"{shown} is out of range; it must be {about.range or 'a finite number'}"
    if callable(value) and where.key.startswith("reward."):
        return f"{shown} is not valid; give a function itself as rm.train(cfg, reward=...)"
    return f"{shown} is not valid; expected {type_name(hint)}"


def _remedy(where: _Place, value: Any) -> str:
    if "[" in where.written:
        return f"there are: {', '.join(where.owner.model_fields)}"
    names = [f"{group}.{where.name}" for group, hint in KEYS.items() if hint is where.owner]
    if former := next((BY_KEY[name] for name in names if name in BY_KEY), None):
        return f"the key is gone: {former.instead}"
    close = get_close_matches(where.name, where.owner.model_fields, n=1)
    if close and where.owner.__name__ != "Config":
        return f"did you mean {where.written.removesuffix(where.name)}{close[0]}?"
    return other_name(where.written[:100], holds_keys=isinstance(value, dict))


def prefix_of(kind: type[Group]) -> str:
    """Return the dotted name of a group, or only its last part if several keys have this class (``layout``)."""
    owners = [key for key, hint in KEYS.items() if hint is kind or item_type(hint) is kind]
    if not owners:
        return ""
    owner = owners[0] if len(owners) == 1 else owners[0].rpartition(".")[2]
    return owner if KEYS.get(owner) is kind or len(owners) > 1 else f"{owner}[]"


def show_value(value: Any) -> str:
    """Return a value for a message."""
    return shorten(repr(value) if isinstance(value, str) else value, 200)  # the repr of others may raise
