"""References in values (``${other.key}``, ``${oc.env:NAME}``): what they refer to, within bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf.grammar_parser import parse

MAX_INTERPOLATED_CHARACTERS = 2000
MAX_REFERENCES = 200  # of one value, those of the values that it refers to included


class Interpolated(NamedTuple):
    """The resolvers that a value calls and the keys that it refers to, as they are written, nested ones included."""

    resolvers: set[str]
    references: list[str]


def examine(value: Any) -> Interpolated:
    """What a value refers to.

    Raises:
        ValueError: it is too long or too deep, or a reference is put together from others.
        OmegaConfBaseException: it cannot be parsed.
    """
    found = Interpolated(set(), [])
    for text in interpolated_texts(value):
        if len(text) > MAX_INTERPOLATED_CHARACTERS:
            raise ValueError(
                f"a text with ${{...}} has at most {MAX_INTERPOLATED_CHARACTERS} characters, this one {len(text)}"
            )
        try:
            pending: list[Any] = [parse(text)]
        except RecursionError as error:
            raise ValueError("${...} is nested too deep") from error
        while pending:
            node = pending.pop()
            if hasattr(node, "resolverName"):
                found.resolvers.add(node.resolverName().getText())
            elif type(node).__name__ == "InterpolationNodeContext":
                key = node.getText()[2:-1].strip()
                if "${" in key:
                    raise ValueError(f"the key in ${{{key}}} has to be written out")
                found.references.append(key)
            pending.extend(getattr(node, "children", None) or [])
    return found


def interpolated_texts(value: Any) -> Iterator[str]:
    """The texts in a value that have something to resolve."""
    if isinstance(value, str) and "${" in value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from interpolated_texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from interpolated_texts(item)


def count_references(key: str, references: Mapping[str, list[str]], known: dict[str, int]) -> int:
    """References that have to be followed to resolve ``key``; at most about ``MAX_REFERENCES`` are counted.

    ``references`` are those of every interpolated value, ``known`` what has been counted. A cycle counts once: resolving finds it.
    """
    if key not in known:
        known[key] = 1  # while it is counted: ends a cycle
        total = 0
        for reference in references.get(key, ()):
            # Each leading dot is one group up. Places in lists are left out.
            name = reference.lstrip(".")
            dots = len(reference) - len(name)
            name = name.partition("[")[0]
            target = ".".join([*key.split(".")[:-dots], name]) if dots else name
            total += 1 + sum(
                count_references(other, references, known)
                for other in references
                if other == target or other.startswith((f"{target}.", f"{target}["))
            )
            if total > MAX_REFERENCES:
                break
        known[key] = total
    return known[key]
