"""YAML files and ``a.b=c`` overrides -> a flat list of settings, in the order in which they apply.

A value of a text field is the text as it was written: YAML would turn ``off`` into False, ``1.10`` into 1.1 and ``1e3``
into 1000.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group, is_text, item_keys, item_type, nearest

BASE_KEY = "base"
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class Setting:
    """One key that a user has set. ``place`` says where, for messages ("configs/a.yaml:7", "override")."""

    key: str
    value: Any
    place: str


class _Document:
    """One parsed YAML text: its root node, and what is needed to turn nodes into values and places."""

    def __init__(self, text: str, name: str, *, is_file: bool) -> None:
        self._name = name
        self._is_file = is_file
        try:
            self._loader = yaml.SafeLoader(text)
            self.root: yaml.Node | None = self._loader.get_single_node()
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}{_position(error, is_file)}: not valid YAML: {_reason(error)}") from error

    def place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._is_file else self._name

    def value(self, node: yaml.Node, hint: Any) -> Any:
        """The value of a node that is meant for a field of type ``hint``."""
        if is_text(hint) and isinstance(node, yaml.ScalarNode) and node.tag != _NULL:
            return node.value
        if isinstance(node, yaml.SequenceNode) and item_type(hint) is not None:
            return [self.value(item, item_type(hint)) for item in node.value]
        try:
            return self._loader.construct_document(node)
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.place(node)}: not a plain value: {_reason(error)}") from error

    def items(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
        seen: dict[str, str] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in seen:
                raise ConfigError(f"{self.place(key_node)}: key {key!r} appears twice (also at {seen[key]}); keep one")
            seen[key] = self.place(key_node)
            yield key, value_node


class SettingReader:
    """Collects settings, and problems instead of stopping at the first one."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []
        self.problems: list[str] = []

    def read_file(self, path: Path, chain: tuple[Path, ...] = ()) -> None:
        """Take the settings of a file, after those of the files named by its ``base``.

        ``chain`` holds the files that led here. The text of broken files is reported in ``problems``.
        """
        if path.resolve() in chain:
            names = " -> ".join(p.name for p in (*chain, path))
            self.problems.append(f"{path}: {BASE_KEY} files form a cycle ({names}); remove one {BASE_KEY} entry")
            return
        try:
            document = _Document(_read_text(path), str(path), is_file=True)
            self._take_document(document, path, (*chain, path.resolve()))
        except ConfigError as error:
            self.problems.append(str(error))

    def read_override(self, text: str) -> None:
        """Take one ``a.b=c`` of the command line; ``c`` is YAML."""
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            self.problems.append(f"override {text!r} is not of the form key=value, as in trainer.num_steps=10")
            return
        try:
            document = _Document(value, f"override {text!r}", is_file=False)
            node = document.root or yaml.ScalarNode(_NULL, "")
            self._take(document, key.strip(), node)
        except ConfigError as error:
            self.problems.append(str(error))

    def _take_document(self, document: _Document, path: Path, chain: tuple[Path, ...]) -> None:
        if document.root is None:
            return
        if not isinstance(document.root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values at the top, as in 'seed: 1'")
        items = dict(document.items(document.root))
        if BASE_KEY in items:
            for base in _base_files(document, items.pop(BASE_KEY)):
                self.read_file(path.parent / base, chain)
        for key, node in items.items():
            self._take(document, key, node)

    def _take(self, document: _Document, key: str, node: yaml.Node) -> None:
        is_null = isinstance(node, yaml.ScalarNode) and node.tag == _NULL
        if key not in KEYS:
            self.problems.append(_unknown(key, document.place(node)))
        elif not is_group(key):
            self._take_leaf(document, key, node)
        elif key == "algorithm" and isinstance(node, yaml.ScalarNode) and not is_null:
            self._take(document, "algorithm.preset", node)
        elif isinstance(node, yaml.MappingNode):
            for name, child in document.items(node):
                self._take(document, f"{key}.{name}", child)
        elif not is_null:  # an empty group is a group whose keys are all commented out
            names = ", ".join(known for known in KEYS if known.rpartition(".")[0] == key)
            self.problems.append(f"{document.place(node)}: {key} is a group, not a value; set one of its keys: {names}")

    def _take_leaf(self, document: _Document, key: str, node: yaml.Node) -> None:
        unknown = list(_unknown_item_keys(document, key, node))
        if unknown:
            self.problems.extend(unknown)
            return
        self.settings.append(Setting(key, document.value(node, KEYS[key]), document.place(node)))


def _unknown_item_keys(document: _Document, key: str, node: yaml.Node) -> Iterator[str]:
    allowed = item_keys(KEYS[key])
    if not allowed or not isinstance(node, yaml.SequenceNode):
        return
    for index, item in enumerate(node.value):
        names = [name for name, _ in document.items(item)] if isinstance(item, yaml.MappingNode) else []
        for name in names:
            if name not in allowed:
                yield f"{document.place(item)}: unknown key {key}[{index}].{name}; there are: {', '.join(allowed)}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path}: no such file (looked from {Path.cwd()}); correct the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: cannot be read ({error})") from error


def _base_files(document: _Document, node: yaml.Node) -> list[str]:
    value = document.value(node, str)
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{document.place(node)}: {BASE_KEY}={value!r} must be a file, or a list of files, beside this one"
        )
    return files


def _unknown(key: str, place: str) -> str:
    suggestion = nearest(key)
    top = ", ".join(known for known in KEYS if "." not in known)
    return f"{place}: unknown key {key}; " + (
        f"did you mean {suggestion}?" if suggestion else f"the top keys are: {top}"
    )


def _position(error: yaml.YAMLError, is_file: bool) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if is_file and mark is not None else ""


def _reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)
