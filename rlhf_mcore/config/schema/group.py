"""Checks the values of a configuration when they are assigned: ``cfg.trainer.num_steps = 1.5`` is refused at once.

A number of numpy is taken as a plain one, a ``Path`` as a text, and a single item where a list is expected as a list of it. What range
a number may have, and how keys go together, is validation's to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Optional, get_args, get_origin, get_type_hints

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.key import description_of

_MAX_DEPTH = 32  # of a table; a list that holds itself has no end


class Group:
    """Base of every dataclass of the schema. An unknown key, or a value of another type, raises ConfigError when it is assigned."""

    refuse: ClassVar[
        Callable[[type, str, Any], None]
    ]  # raises what is wrong with a value; set where all keys are known

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
                Group.refuse(kind, name, value)
                return
            object.__setattr__(self, name, fitted)


class Item(Group):
    """Base of the groups that are items of a list, such as a rule; every other one has its place in the tree."""


@cache
def types_of(kind: type) -> dict[str, Any]:
    """Return the type of each key of a group. ``None`` beside ``Any``: the key may be null."""
    hints = get_type_hints(kind)
    nullable = {item.name for item in fields(kind) if hints[item.name] is Any and description_of(item).null}
    return {item.name: Any | None if item.name in nullable else hints[item.name] for item in fields(kind)}


def fit(value: Any, hint: Any, single: Callable[[Any, Any], Any] | None = None) -> Any:
    """Convert the value to a key's type. ``single`` converts what is neither a list nor a table, as ``load.from_text`` does.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    origin, inner, single = get_origin(hint), get_args(hint), single or _fit_assigned
    if NoneType in inner:
        return None if value is None else fit(value, next(kind for kind in inner if kind is not NoneType), single)
    if origin is list:
        return [fit(item, inner[0], single) for item in _items(value)]
    if origin is dict:
        items = _as(Mapping, value).items()
        return {_as(str, name): plain(item) if inner[1] is Any else fit(item, inner[1], single) for name, item in items}
    if is_dataclass(hint):
        return _fit_group(value, hint, single)
    return single(value, hint)


def _fit_assigned(value: Any, hint: Any) -> Any:
    """Convert a single value that was assigned in Python: of the key's type already, or a number of another library."""
    if hint is Any:  # the columns of files, of which some may have none
        return value if isinstance(value, str) else fit(value, list[Optional[str]])
    if hint is str:
        return value if isinstance(value, str) else os.fspath(_as(os.PathLike, value))
    value = unbox(value)
    if hint is bool or isinstance(value, bool):
        return _as(bool, value) if hint is bool else _as(int, None)
    return int(_as(Integral, value)) if hint is int else float(_as(Real, value))


def plain(value: Any, depth: int = 0) -> Any:
    """Check a value of a table, in which any plain one goes."""
    value = unbox(value)
    if depth > _MAX_DEPTH:
        raise ValueError("it is nested too deep")
    if isinstance(value, Mapping):
        return {_as((str, int, float), name): plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if value is None else _as((str, bool, int, float), value)


def unbox(value: Any) -> Any:
    """Turn a number of numpy or torch into a plain one."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _items(value: Any) -> list[Any] | tuple[Any, ...]:
    """Return the items of a list; a single value is a list of it."""
    if isinstance(value, str | os.PathLike | Mapping) or is_dataclass(value):
        return [value]
    if isinstance(value, list | tuple):
        return value
    return list(_as(list, value.tolist() if hasattr(value, "tolist") else value))


def _fit_group(value: Any, kind: Any, single: Callable[[Any, Any], Any]) -> Any:
    """Convert an item of a list: a table, or the text of its first key: ``[math, {name: format, weight: 0.1}]``."""
    if isinstance(value, kind):
        return value
    types = types_of(kind)
    if isinstance(value, str) and issubclass(kind, Item):
        return kind(value)
    if isinstance(value, Mapping) and issubclass(kind, Item) and value.keys() <= types.keys():
        if single is _fit_assigned:  # each is assigned, so that the key of a misfit is named
            return kind(**value)
        return kind(**{name: fit(child, types[name], single) for name, child in value.items()})
    raise TypeError


def _as(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value
