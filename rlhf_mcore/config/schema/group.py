"""Checks the values of a configuration when they are assigned: ``cfg.trainer.num_steps = 1.5`` is refused at once.

A number of numpy is taken as a plain one, a ``Path`` as a text, and a single item where a list is expected as a list of it. What range
a number may have, and how keys go together, is validation's to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, Optional, get_args, get_origin, get_type_hints

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.key import description_of

_MAX_DEPTH = 32  # of a table; a list that holds itself has no end


class Group:
    """Base of every dataclass of the schema. An unknown key, or a value of another type, raises ConfigError when it is assigned."""

    if not TYPE_CHECKING:  # a type checker would take any name for a key

        def __setattr__(self, name: str, value: Any) -> None:
            kind = type(self)
            hint = types_of(kind).get(name)
            try:
                fitted = None if hint is None else fit(value, hint)
            except ConfigError:  # of an item of a list
                raise
            except (TypeError, ValueError, OverflowError):
                hint = None
            if hint is None:
                from rlhf_mcore.config.assignment import assignment_problem  # knows all keys, and with that this module

                raise ConfigError(assignment_problem(kind, name, value))
            object.__setattr__(self, name, fitted)


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The type of each key of a group. ``None`` beside ``Any``: the key may be null."""
    hints = get_type_hints(kind)
    nullable = {item.name for item in fields(kind) if hints[item.name] is Any and description_of(item).null}
    return {item.name: Any | None if item.name in nullable else hints[item.name] for item in fields(kind)}


def fit(value: Any, hint: Any) -> Any:
    """The value as one of a key's type.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if NoneType in inner:
        return None if value is None else fit(value, next(kind for kind in inner if kind is not NoneType))
    if origin is list:
        return _fit_list(value, inner[0])
    if origin is dict:
        items = _as(Mapping, value).items()
        return {_as(str, name): plain(held) if inner[1] is Any else fit(held, inner[1]) for name, held in items}
    if hint is Any:  # the columns of files, of which some may have none
        return value if isinstance(value, str) else _fit_list(value, Optional[str])
    if is_dataclass(hint):
        return _fit_group(value, hint)
    if hint is str:
        return value if isinstance(value, str) else os.fspath(_as(os.PathLike, value))
    value = unboxed(value)
    if hint is bool or isinstance(value, bool):
        return _as(bool, value) if hint is bool else _as(int, None)
    return int(_as(Integral, value)) if hint is int else float(_as(Real, value))


def plain(value: Any, depth: int = 0) -> Any:
    """A value of a table, in which any plain one goes."""
    value = unboxed(value)
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(value, Mapping):
        return {_as(str, name): plain(held, depth + 1) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [plain(held, depth + 1) for held in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if value is None else _as((str, bool, int, float), value)


def unboxed(value: Any) -> Any:
    """A number of numpy or torch as a plain one."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _fit_list(value: Any, kind: Any) -> list[Any]:
    if isinstance(value, str | os.PathLike | Mapping) or is_dataclass(value):
        value = [value]
    if not isinstance(value, list | tuple):
        value = _as(list, value.tolist() if hasattr(value, "tolist") else value)
    return [fit(item, kind) for item in value]


def _fit_group(value: Any, kind: Any) -> Any:
    """An item of a list may be a table, or the text of its first key: ``[math, {name: format, weight: 0.1}]``."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and not is_tree(kind):
        return kind(value)
    if isinstance(value, Mapping) and not is_tree(kind) and value.keys() <= types_of(kind).keys():
        return kind(**value)
    raise TypeError


def is_tree(kind: type) -> bool:
    """Whether a group is a place of the tree, and not an item of a list."""
    from rlhf_mcore.config.keys import KEYS

    return kind in KEYS.values() or kind.__name__ == "Config"


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value
