"""Declare keys: a default, a help phrase, and the allowed values as the type of the field.

The pydantic models, configs/base.yaml, docs/reference/config/ and the JSON Schema are generated from these declarations. Help is a
phrase in Markdown without a full stop. Further sentences stand in a text below the field (``group.text_below``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, Predicate
from pydantic import Field
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
