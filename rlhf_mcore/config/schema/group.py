"""Declare keys, and their groups: pydantic models whose errors are ``ConfigError``.

The models, configs/base.yaml, docs/reference/config/ and the JSON Schema are generated from the declarations. Help is a phrase in
Markdown without a full stop. Further sentences stand in a text below the field (``text_below``).

Values are converted: numpy numbers to plain numbers, a ``Path`` to a text, a single item to a list, a text to the value that it
spells. Subclasses of ``str`` are kept, because they mark functions from Python and values from the environment.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, Predicate
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Size = Annotated[int, Ge(1), Le(4096)]  # parts of a layout; models have fewer layers, heads and experts
TopK = Annotated[int, Ge(-1), Predicate(bool)]


def is_address(text: str) -> bool:
    """Return whether a text is ``host:port``."""
    port = re.fullmatch(r"[^:]+:(\d{1,5})", text)
    return port is not None and 1 <= int(port[1]) <= 65535


def is_url(text: str) -> bool:
    """Return whether a text begins like an address of a web server."""
    return text.startswith(("http://", "https://"))


CHOICE = "choice"  # pydantic's type of an error by ``Choices``
ENGINE = "rollout.engine"  # for ``only_with``: only some engines read the key


@dataclass(frozen=True, slots=True)
class Choices:
    """Allowed texts, for an annotation: names, and other texts that ``allows`` accepts (``form`` describes them in messages)."""

    names: tuple[str, ...] = ()
    allows: Callable[[str], bool] | None = None
    form: str = ""

    def __get_pydantic_core_schema__(self, source: Any, build: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, build(source))

    def _check(self, value: str) -> str:
        if value not in self.names and not (self.allows is not None and self.allows(value)):
            raise PydanticCustomError(CHOICE, "not a choice")
        return value

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"{names}, or {self.form}" if names and self.form else names or self.form


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a key or a group, from its declaration."""

    help: str = ""
    choices: Choices | None = None
    bounds: tuple[Any, ...] = ()  # ``Ge``, ``Gt``, ``Le``, ``Lt`` of a number
    # A resumed run must have the same value, otherwise it would be neither the old run nor a new run
    is_fixed: bool = False
    # Condition without which the key has no effect: "other.key=value", "other.key=value or value", or "other.key" (set, above 0).
    # A condition that begins with a dot names a key of the same group.
    only_with: str = ""

    @property
    def range(self) -> str:
        """The bounds in words, or ""."""
        words = {Ge: "at least {0.ge:g}", Gt: "greater than {0.gt:g}", Le: "at most {0.le:g}", Lt: "below {0.lt:g}"}
        return " and ".join(words.get(type(bound), "not 0").format(bound) for bound in self.bounds)


def key(default: Any, help: str = "", *, is_fixed: bool = False, only_with: str = "") -> Any:
    """Declare a field that a user may set. Arguments are as in ``Description``."""
    return Field(default, description=help, json_schema_extra={"is_fixed": is_fixed, "only_with": only_with})


def group(kind: Any, help: str = "") -> Any:
    """Declare a field that contains further keys. ``kind`` is its class, or a function that builds it with other defaults."""
    return Field(default_factory=kind, description=help)


class Hooks:
    """Functions of modules that import this one. The package ``schema`` sets them."""

    explain: Callable[[type[Group], ValidationError], Exception]
    show: Callable[[Any], str]


HOOKS = Hooks()


class Group(BaseModel):
    """Base of every group. ``cfg.a.b = value`` raises ConfigError if the key does not exist or does not allow the value."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        defer_build=True,  # most commands read no configuration
    )

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise HOOKS.explain(type(self), error) from None

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(cls, value: Any, read: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        item = cls.model_fields[info.field_name]
        if is_group_type(item.annotation) and isinstance(value, Mapping):
            value = {**dict(item.get_default(call_default_factory=True)), **value}
        prepared = _prepare(value, plain_type(item.annotation))
        return _keep_texts(prepared, read(prepared))


G = TypeVar("G", bound=Group)


def with_values(group: G, values: Mapping[str, Any]) -> G:
    """Return a copy of a group with other values for dotted keys. The values are not validated."""
    update: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            update[name] = value
    update |= {name: with_values(getattr(group, name), below) for name, below in inner.items()}
    return group.model_copy(update=update)


class Item(Group):
    """Base of groups that are items of a list, such as a rule. A text sets the first key."""


def plain_type(hint: Any) -> Any:
    """Return a type without its annotations, such as bounds."""
    if get_origin(hint) is Annotated:
        return plain_type(get_args(hint)[0])
    if get_origin(hint) in (None, Literal):
        return hint
    inner = tuple(map(plain_type, get_args(hint)))
    return Union[inner] if get_origin(hint) in (Union, UnionType) else get_origin(hint)[inner]


def inner_types(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union without None, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for kind in get_args(hint) if kind is not NoneType)
    return (hint,)


def is_group_type(hint: Any) -> bool:
    """Return whether a type is a group of keys."""
    return isinstance(hint, type) and issubclass(hint, Group)


def to_dict(group: Group) -> dict[str, Any]:
    """Return a group as plain dicts and lists. It keeps subclasses of str, which pydantic's ``model_dump`` does not."""
    return {name: _plain(value) for name, value in group}


def _plain(value: Any) -> Any:
    if isinstance(value, Group):
        return to_dict(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _prepare(value: Any, hint: Any) -> Any:
    """Convert a Python value to a value that pydantic reads for a type."""
    value = unbox(value)
    if isinstance(value, bool) and not {bool, Any}.intersection(inner_types(hint)):
        raise PydanticCustomError("bool_type", "a flag")  # pydantic would read 0 or 1
    for kind in inner_types(hint):
        if kind is str and not isinstance(value, list | tuple):
            break
        if get_origin(kind) is list and value is not None:
            item = get_args(kind)[0]
            return [_prepare_item(one, item) for one in _items(value)]
        if get_origin(kind) is dict and isinstance(value, Mapping):
            item = get_args(kind)[1]
            return {name: unbox_all(one) if item is Any else _prepare(one, item) for name, one in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _prepare_item(value: Any, kind: Any) -> Any:
    value = _prepare(value, kind)
    if isinstance(value, str) and is_group_type(kind):
        return {next(iter(kind.model_fields)): value}
    return value


def _items(value: Any) -> Any:
    if isinstance(value, str | os.PathLike | Mapping | Group):
        return [value]
    return value.tolist() if hasattr(value, "tolist") else value if isinstance(value, list | tuple) else [value]


def unbox(value: Any) -> Any:
    """Convert a numpy or torch number to a plain number. Other values are returned unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def unbox_all(value: Any) -> Any:
    """Convert a value of a table to plain dicts, lists and values.

    Raises:
        ValueError: it contains anything else.
    """
    value = unbox(value)
    if isinstance(value, Mapping):
        return {name: unbox_all(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [unbox_all(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is not None and not isinstance(value, str | bool | int | float):
        raise ValueError(f"{type(value).__name__} is not a plain value")
    return value


def _keep_texts(given: Any, read: Any) -> Any:
    """Return the read value with the given texts, because pydantic copies a subclass of str to a plain str."""
    if isinstance(given, str) and type(given) is not str and isinstance(read, str):
        return given
    if isinstance(given, list) and isinstance(read, list):
        return [_keep_texts(*pair) for pair in zip(given, read, strict=True)]
    return read


@cache
def describe_keys(kind: type[Group]) -> dict[str, tuple[Any, Description]]:
    """Return the type and the description of each key of a group."""
    found: dict[str, tuple[Any, Description]] = {}
    for name, item in kind.model_fields.items():
        hint, limits = plain_type(item.annotation), _annotations(item)
        extra: Any = item.json_schema_extra or {}
        choices = [limit for limit in limits if isinstance(limit, Choices)]
        choices += [Choices(get_args(inner)) for inner in _item_types(hint) if get_origin(inner) is Literal]
        found[name] = (
            hint,
            Description(
                help=item.description or "",
                choices=choices[0] if choices else None,
                bounds=() if choices else limits,
                **extra,
            ),
        )
    return found


def _item_types(hint: Any) -> list[Any]:
    """Return the members of a union without None, and the item types of lists instead of the lists."""
    kinds = inner_types(hint)
    return [
        inner for kind in kinds for inner in (_item_types(get_args(kind)[0]) if get_origin(kind) is list else [kind])
    ]


def _annotations(item: FieldInfo) -> tuple[Any, ...]:
    """Return the annotations of a field's type, also within ``Optional`` and ``list``."""
    annotated = [kind for kind in _item_types(item.annotation) if get_origin(kind) is Annotated]
    return (*item.metadata, *(limit for kind in annotated for limit in get_args(kind)[1:]))


def text_below(kind: type[Group], name: str) -> str:
    """Return the text below a field in the source of its class: further sentences about the key, or ""."""
    owner = [base for base in kind.__mro__ if issubclass(base, Group) and name in base.model_fields][-1]
    for field, text in pairwise(_class_bodies(owner.__module__)[owner.__name__]):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=found)), ast.Expr(value=ast.Constant(value=str(content))):
                if found == name:
                    return " ".join(content.split())
    return ""


@cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
