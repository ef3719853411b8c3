"""References in values (``${other.key}``, ``${oc.env:NAME}``): what they refer to, within bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse

from rlhf_mcore.config.yaml_text import interpolated_texts

MAX_INTERPOLATED_CHARACTERS = 2000
MAX_REFERENCES = 200  # of one value, those of the values that it refers to included


class Interpolated(NamedTuple):
    """The resolvers and the keys in a value, as they are written, nested ones included."""

    resolvers: set[str]
    references: list[str]


def examine(value: Any) -> Interpolated:
    """List what a value refers to.

    Raises:
        ValueError: it is too long or too deep, cannot be parsed, or a reference is put together from others.
    """
    interpolated = Interpolated(set(), [])
    for text in interpolated_texts(value):
        if len(text) > MAX_INTERPOLATED_CHARACTERS:
            raise ValueError(
                f"a text with ${{...}} has at most {MAX_INTERPOLATED_CHARACTERS} characters, this one {len(text)}"
            )
        try:
            pending: list[Any] = [parse(text)]
        except RecursionError as error:
            raise ValueError("${...} is nested too deep") from error
        except OmegaConfBaseException as error:
            raise ValueError(str(error)) from error
        while pending:
            node = pending.pop()
            if hasattr(node, "resolverName"):
                interpolated.resolvers.add(node.resolverName().getText())
            elif type(node).__name__ == "InterpolationNodeContext":
                key = node.getText()[2:-1].strip()
                if "${" in key:
                    raise ValueError(f"the key in ${{{key}}} has to be written out")
                interpolated.references.append(key)
            pending.extend(getattr(node, "children", None) or [])
    return interpolated


def count_references(key: str, references: Mapping[str, list[str]], known: dict[str, int]) -> int:
    """Count the references that have to be followed to resolve ``key``; at most about ``MAX_REFERENCES`` are counted.

    ``references`` are those of every interpolated value, ``known`` what has been counted. A cycle counts once: resolving finds it.
    """
    if key not in known:
        known[key] = 1  # while it is counted: ends a cycle
        total = 0
        for reference in references.get(key, ()):
            total += 1 + sum(count_references(other, references, known) for other in _meant(key, reference, references))
            if total > MAX_REFERENCES:
                break
        known[key] = total
    return known[key]


def resolution_order(references: Mapping[str, list[str]]) -> list[str]:
    """Sort the keys of ``references``, each after those that it refers to; of a cycle in any order."""
    order: dict[str, bool] = {}

    def visit(key: str) -> None:
        if key not in order:
            order[key] = False  # ends a cycle
            for reference in references[key]:
                for other in _meant(key, reference, references):
                    visit(other)
            del order[key]
            order[key] = True

    for key in references:
        visit(key)
    return list(order)


def _meant(key: str, reference: str, keys: Iterable[str]) -> list[str]:
    """List which of ``keys`` a reference in the value of ``key`` reads: one key, or all in a group. Places in lists are left out."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)  # each is one group up
    name = name.partition("[")[0]
    target = ".".join([*key.split(".")[:-dots], name]) if dots else name
    return [other for other in keys if other == target or other.startswith((f"{target}.", f"{target}["))]


class Tree:
    """Values by their dotted keys, some of which refer to others.

    ``defaults`` has all keys, ``written`` those that refer.
    """

    def __init__(self, defaults: dict[str, Any], written: Mapping[str, Any]) -> None:
        self._tree = OmegaConf.create(defaults)
        for key, value in written.items():
            self.set(key, value)

    def set(self, key: str, value: Any) -> None:
        """Put a value at a key."""
        OmegaConf.update(self._tree, key, value, merge=False)

    def resolve(self, key: str) -> Any:
        """Return the value at a key as plain lists and tables, without references.

        Raises:
            ValueError: it does not resolve; the message is one line.
        """
        try:
            value = OmegaConf.select(self._tree, key)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            raise ValueError(str(error).partition("\n")[0]) from error
