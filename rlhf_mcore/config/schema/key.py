"""Descriptions of keys, declared with their fields.

The pydantic models, configs/base.yaml, docs/reference/config/ and the JSON Schema are generated from them. Help is a phrase in
Markdown without a full stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers: from ``low`` to ``high``, and ``off``. An open end excludes the bound."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    off: float | None = None

    def bounds(self) -> dict[str, float]:
        """Return the bounds as arguments of pydantic's ``Field``. With ``off`` they are empty; ``Group`` checks the value."""
        if self.off is not None:
            return {}
        low = {"gt" if self.open_low else "ge": self.low} if self.low > -math.inf else {}
        return low | ({"lt" if self.open_high else "le": self.high} if self.high < math.inf else {})

    def holds(self, value: float) -> bool:
        """Return whether a number is allowed."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return value == self.off or (math.isfinite(value) and above and below)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        words = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        if self.high < math.inf:
            words += f" and {'below' if self.open_high else 'at most'} {self.high:g}"
        return words if self.off is None else f"{words}, or {self.off:g} for off"


@dataclass(frozen=True, slots=True)
class Choices:
    """Allowed texts with their meanings. A meaning is "" if the name explains itself."""

    meanings: Mapping[str, str]
    or_function: bool = False  # also allows path/to/file.py:name
    adds: Callable[[str], bool] | None = (
        None  # returns whether another text is allowed, such as a name that an installed package adds
    )
    others: str = ""  # the form of the texts that ``adds`` allows, for messages

    def holds(self, value: str) -> bool:
        """Return whether a text is allowed. Paths of functions are not checked here."""
        return value in self.meanings or (self.adds is not None and self.adds(value))

    def __str__(self) -> str:
        others = "path/to/file.py:name" if self.or_function else self.others
        return ", ".join(self.meanings) + (f", or {others}" if others else "")


FINITE = Range()
AT_LEAST_0 = Range(0)
AT_LEAST_1 = Range(1)
ABOVE_0 = Range(0, open_low=True)
FROM_0_TO_1 = Range(0, 1)
SHARE = Range(0, 1, open_low=True)


def one_of(*names: str, **meanings: str) -> Choices:
    """List choices: names that explain themselves, then names with their meanings."""
    return Choices({**dict.fromkeys(names, ""), **meanings})


def function_or(names: Iterable[str]) -> Choices:
    """Allow the named functions, or a function in a user's file."""
    return Choices(dict.fromkeys(names, ""), or_function=True)


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a key or a group."""

    help: str = ""
    allowed: Range | Choices | None = None
    null: str = ""  # meaning of null
    unit: str = ""  # only if the name of the key does not contain it
    more: str = ""  # further sentences for the documentation
    # A resumed run must have the same value, otherwise it would be neither the old run nor a new run
    is_fixed: bool = False
    # Condition without which the key has no effect: "other.key=value", "other.key=value or value", or "other.key" (above 0)
    only_with: str = ""


def key(
    default: Any,
    help: str = "",
    allowed: Range | Choices | None = None,
    *,
    null: str = "",
    unit: str = "",
    more: str = "",
    is_fixed: bool = False,
    only_with: str = "",
) -> Any:
    """Declare a field that a user may set. Arguments are as in ``Description``; a list as default is copied."""
    described = Description(help, allowed, null, unit, more, is_fixed, only_with)
    bounds: dict[str, Any] = dict(allowed.bounds()) if isinstance(allowed, Range) else {}
    if isinstance(default, list):
        return Field(default_factory=lambda: deepcopy(default), json_schema_extra={_OURS: described}, **bounds)  # type: ignore[dict-item]
    return Field(default, json_schema_extra={_OURS: described}, **bounds)  # type: ignore[dict-item]


def group(kind: Any, help: str = "", more: str = "") -> Any:
    """Declare a field that contains further keys. ``kind`` is its class, or a function that builds it with other defaults."""
    described = Description(help, more=more)
    return Field(default_factory=kind, json_schema_extra={_OURS: described})  # type: ignore[dict-item]


_OURS = "described"


def description_of(item: FieldInfo) -> Description:
    """Return the description of a field."""
    assert isinstance(item.json_schema_extra, dict)
    described: Any = item.json_schema_extra[_OURS]
    return described
