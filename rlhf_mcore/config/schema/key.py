"""Describe a key once, beside its field. Validation, configs/base.yaml and docs/configuration.md follow from it.

Help is a phrase in Markdown, without a full stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers: from ``low`` to ``high``, finite ones only; an open end excludes the bound itself. ``off`` is allowed too."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    off: float | None = None

    def holds(self, value: float) -> bool:
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
    """Allowed texts, each with what it means ("" where its name tells)."""

    meanings: Mapping[str, str]
    or_function: bool = False  # or path/to/file.py:name
    adds: Callable[[str], bool] | None = None  # tells names that installed packages add

    def holds(self, value: str) -> bool:
        """Return whether a text is one of these names, or one that an installed package adds."""
        return value in self.meanings or (self.adds is not None and self.adds(value))

    def __str__(self) -> str:
        return ", ".join(self.meanings) + (", or path/to/file.py:name" if self.or_function else "")


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
    """Allow one of our functions, or one of a user's file."""
    return Choices(dict.fromkeys(names, ""), or_function=True)


@dataclass(frozen=True, slots=True)
class Description:
    """Describe a key or a group."""

    help: str = ""
    allowed: Range | Choices | None = None
    null: str = ""  # what null means
    unit: str = ""  # where the name of the key does not tell
    more: str = ""  # sentences for the documentation alone
    # A run that resumes has the same value: with another one it would be neither the old run nor a new one
    is_fixed: bool = False
    # "other.key=value", "other.key=value or value", or "other.key" for one that is above 0: without it the key has no effect
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
    """Declare a field that a user may set. Arguments as of ``Description``; a list as default is copied."""
    metadata = {"description": Description(help, allowed, null, unit, more, is_fixed, only_with)}
    if isinstance(default, list):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: Any, help: str = "", more: str = "") -> Any:
    """Declare a field that holds further keys. ``kind``: its dataclass, or a function that makes one with other defaults."""
    return field(default_factory=kind, metadata={"description": Description(help, more=more)})


def description_of(item: Field[Any]) -> Description:
    """Return the description of a dataclass's field."""
    described: Description = item.metadata["description"]
    return described
