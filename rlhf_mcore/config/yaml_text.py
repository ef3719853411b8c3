"""YAML that people and other programs wrote: read within bounds, so that no file can take the memory or the time of a machine.

A kilobyte of YAML can stand for gigabytes, because an alias (``*name``) repeats what its anchor (``&name``) holds. The bounds are
on what a document stands for, and are checked before it is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import is_plain, read_text, shorten

MAX_BYTES = 256 * 2**10  # the longest configuration of ours has 10 kB
MAX_NODES = 50_000  # keys and values, aliases replaced by what they stand for
MAX_DEPTH = 24
_MOST_LEVELS = 200  # that are built at all: libyaml would overflow the stack
_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml's parser, which PyYAML's wheels have, is ten times as fast


def read_yaml_text(path: Path, what: str) -> str:
    """Read the text of a YAML file; ``what`` it is ("config file") begins the messages.

    Raises:
        ConfigError: it is not a readable text of at most ``MAX_BYTES``.
    """
    return read_text(path, limit=MAX_BYTES, where=f"{what} {path}", remedy="correct the path or the file")


class Document:
    """One YAML text: its root node (None: it is empty), and what is needed to turn nodes into values and places.

    Raises:
        ConfigError: it is not valid YAML, or is beyond the bounds.
    """

    def __init__(self, text: str, name: str, *, is_file: bool = False) -> None:
        self.name = name
        self._is_file = is_file
        try:
            _refuse_depth(text)
            self._loader = _LOADER(text)
            self.root: yaml.Node | None = self._loader.get_single_node()
        except RecursionError as error:
            raise ConfigError(f"{name}: not valid YAML: nested deeper than {MAX_DEPTH}; write it flat") from error
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape that is no character
            mark = getattr(error, "problem_mark", None)
            place = f"{name}:{mark.line + 1}" if is_file and mark is not None else name
            raise ConfigError(f"{place}: not valid YAML: {_reason(error)}") from error
        if self.root is not None:
            self._measure(self.root, 1, {}, set())

    def place(self, node: yaml.Node) -> str:
        """Say where a node is, for messages."""
        return f"{self.name}:{node.start_mark.line + 1}" if self._is_file else self.name

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node: what YAML makes of it, integers of 64 bits only.

        Raises:
            ConfigError: it is no plain value.
        """
        try:
            value = self._loader.construct_document(node)
            _check_integers(value)
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"{self.place(node)}: not a plain value: {_reason(error)}") from error
        return value

    def _measure(
        self, node: yaml.Node, level: int, known: dict[int, tuple[int, int]], active: set[int]
    ) -> tuple[int, int]:
        """Measure how many nodes a node stands for and how deep they go; raises beyond the bounds."""
        size, depth = known.get(id(node), (1, 0))
        if level + depth > MAX_DEPTH:
            raise ConfigError(f"{self.place(node)}: not valid YAML: nested deeper than {MAX_DEPTH}; write it flat")
        if id(node) in known:
            return size, depth
        if id(node) in active:
            raise ConfigError(f"{self.place(node)}: not valid YAML: an alias refers to what holds it; remove it")
        if isinstance(node, yaml.ScalarNode) and not is_plain(node.value):
            raise ConfigError(f"{self.place(node)}: not valid YAML: a text with a NUL or a lone surrogate; remove it")
        active.add(id(node))
        for child in _children(node):
            inner = self._measure(child, level + 1, known, active)
            size, depth = size + inner[0], max(depth, inner[1] + 1)
            if size > MAX_NODES:
                raise ConfigError(
                    f"{self.place(node)}: not valid YAML: aliases replaced, it has more than {MAX_NODES:,} keys and values; "
                    "write what is meant without aliases"
                )
        active.remove(id(node))
        known[id(node)] = size, depth
        return size, depth


def load_yaml(text: str, name: str) -> Any:
    """Load the value of a whole YAML text, None if it is empty.

    Raises:
        ConfigError: it is not valid YAML, no plain value, or beyond the bounds.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: {len(text):,} characters, but at most {MAX_BYTES:,} are read")
    document = Document(text, name)
    return None if document.root is None else document.value(document.root)


def _refuse_depth(text: str) -> None:
    """Raise RecursionError where a text is nested too deep to be built."""
    level = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > _MOST_LEVELS:
            raise RecursionError


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_integers(value: Any) -> None:
    if isinstance(value, dict):
        for child in value.values():
            _check_integers(child)
    elif isinstance(value, list | tuple | set):
        for child in value:
            _check_integers(child)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer beyond 64 bits")


def _reason(error: Exception) -> str:
    return shorten(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error), 200)


# -------------------------------------------------------------------------------------------------------- interpolations


def interpolated_texts(value: Any) -> Iterator[str]:
    """List the texts in a value that have something to resolve."""
    if isinstance(value, str) and "${" in value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from interpolated_texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from interpolated_texts(item)
