"""Collect the user's settings: keys, values and places, in the order of files and overrides. Write configurations as YAML.

Text fields keep the written text. YAML would turn ``off`` into False, ``1.10`` into 1.1 and ``1e3`` into 1000.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import BY_KEY, is_former_group, to_current
from rlhf_mcore.config.keys import KEYS, is_group, table_of
from rlhf_mcore.config.other_names import hint, is_foreign_group
from rlhf_mcore.config.schema.group import describe_keys, inner_types, is_group_type, to_dict
from rlhf_mcore.config.schema.tree import SHORT, merge
from rlhf_mcore.foreign import read_text, shorten
from rlhf_mcore.redaction import redact, redact_arguments

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config

BASE_KEY = "base"
_NULL = "tag:yaml.org,2002:null"
_SUGGESTIONS = 20  # unknown keys with a suggestion, because each search takes milliseconds
MAX_BYTES = 2**20  # our longest configuration has 40 kB
# libyaml's parser is ten times as fast. PyYAML's wheels contain it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_text(path: Path, what: str) -> str:
    """Read the text of a YAML file. Messages begin with ``what``, a name for the file ("config file").

    Raises:
        ConfigError: it is not a readable text of at most ``MAX_BYTES``.
    """
    return read_text(path, limit=MAX_BYTES, where=f"{what} {path}", remedy="correct the path or the file")


class Document:
    """A parsed YAML text. It returns the value and the line of each node. ``root`` is None if the text is empty.

    Raises:
        ConfigError: it is not valid YAML.
    """

    def __init__(self, text: str, name: str, *, is_file: bool = False) -> None:
        self.name = name
        self._is_file = is_file
        try:
            self._loader = _LOADER(text)
            self.root: yaml.Node | None = self._loader.get_single_node()
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape is not a valid character
            mark = getattr(error, "problem_mark", None)
            place = f"{name}:{mark.line + 1}" if is_file and mark is not None else name
            raise ConfigError(f"{place}: not valid YAML: {_reason(error)}") from error

    def place(self, node: yaml.Node) -> str:
        """Return the file and line of a node, for messages."""
        return f"{self.name}:{node.start_mark.line + 1}" if self._is_file else self.name

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node.

        Raises:
            ConfigError: it is not a plain value.
        """
        try:
            return self._loader.construct_document(node)
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.place(node)}: not a plain value: {_reason(error)}") from error


def load_yaml(text: str, name: str) -> Any:
    """Return the value of a whole YAML text, or None if it is empty.

    PyYAML's own parser is used, because libyaml's parser may overflow the stack. Some of these texts come from data sets.

    Raises:
        ConfigError: it is not valid YAML, or not a plain value.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply; use fewer levels") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {_reason(error)}") from error


def to_yaml(cfg: Config) -> str:
    """Return a configuration as YAML without its secrets, in the order of the schema. The text is a valid config file."""
    return str(yaml.safe_dump(redact(to_dict(cfg)), sort_keys=False, allow_unicode=True, default_flow_style=False))


def interpolated_texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value that contain references."""
    if isinstance(value, str) and "${" in value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from interpolated_texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from interpolated_texts(item)


def _reason(error: Exception) -> str:
    return shorten(str(getattr(error, "problem", None) or getattr(error, "reason", None) or error), 200)


class SettingReader:
    """Collects settings and problems. It does not stop at the first problem.

    Attributes:
        values: the values by key, in the order in which they were set. A later value wins, and tables are merged.
        places: file and line of each key, for messages ("configs/a.yaml:7", "override ...").
        is_whole: whether every file could be read. Otherwise settings are missing, and rules would report consequences of that.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self.is_whole = True
        self._num_unknown = 0

    def _set(self, key: str, value: Any, place: str) -> None:
        self.values[key] = merge(self.values.pop(key, None), value)
        self.places[key] = place

    def read_file(self, path: Path, chain: tuple[str, ...] = ()) -> None:
        """Add the settings of the files in ``base``, then the settings of the file.

        ``chain`` contains the files that refer to this file, to detect cycles. Unreadable files are reported in ``problems``.
        """
        real = os.path.realpath(path)
        if real in chain:
            names = " -> ".join(os.path.basename(name) for name in (*chain, real))
            self.problems.append(f"{path}: {BASE_KEY} files form a cycle ({names}); remove one {BASE_KEY} entry")
            self.is_whole = False
            return
        try:
            document = Document(read_yaml_text(path, "config file"), str(path), is_file=True)
            self._take_document(document, path, (*chain, real))
        except ConfigError as error:
            self.problems.append(str(error))
            self.is_whole = False

    def read_override(self, text: str) -> None:
        """Add one ``a.b=c`` of the command line. ``c`` is YAML."""
        key, equals, value = text.partition("=")
        name = f"override {shorten(redact_arguments([text])[0], 200)!r}"
        if not equals or not key.strip():
            self.problems.append(f"{name} is not of the form key=value, as in trainer.num_steps=10")
            return
        try:
            document = Document(value, name)
            node = document.root or yaml.ScalarNode(_NULL, "")
            self._take(document, key.strip(), node)
        except ConfigError as error:
            self.problems.append(str(error))

    def translate_former(self) -> None:
        """Replace settings of former keys by settings of current keys, with a warning for each."""
        try:
            self.values = to_current(self.values, self.places.__getitem__)
        except ConfigError as error:
            self.problems.append(str(error))
        self.values = {key: value for key, value in self.values.items() if key in KEYS}

    def _take_document(self, document: Document, path: Path, chain: tuple[str, ...]) -> None:
        if document.root is None:
            return
        if not isinstance(document.root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values at the top level, as in 'seed: 1'")
        items = dict(_items(document, document.root))
        if BASE_KEY in items:
            for base in _base_files(document, items.pop(BASE_KEY)):
                self.read_file(path.parent / base, chain)
        for key, node in items.items():
            self._take(document, key, node)

    def _take(self, document: Document, key: str, node: yaml.Node) -> None:
        is_null = isinstance(node, yaml.ScalarNode) and node.tag == _NULL
        if (table := table_of(key)) is not None:
            value = document.value(node)
            for name in reversed(key[len(table) + 1 :].split(".")):
                value = {name: value}
            self._set(table, value, document.place(node))
        elif key in BY_KEY and key not in KEYS:
            self._set(key, document.value(node), document.place(node))
        elif key not in KEYS and not is_former_group(key):
            self._take_unknown(document, key, node)
        elif key in KEYS and not is_group(key):
            self._set(key, _value(document, node, KEYS[key]), document.place(node))
        elif key in SHORT and isinstance(node, yaml.ScalarNode) and not is_null:
            self._take(document, f"{key}.{SHORT[key]}", node)
        elif isinstance(node, yaml.MappingNode):
            for name, child in _items(document, node):
                self._take(document, f"{key}.{name}", child)
        elif not is_null:  # null is allowed, because all keys of a group may be commented out
            names = ", ".join(name for name in KEYS if name.rpartition(".")[0] == key)
            self.problems.append(f"{document.place(node)}: {key} is a group, not a value; set one of its keys: {names}")

    def _take_unknown(self, document: Document, key: str, node: yaml.Node) -> None:
        """Report an unknown key. If it is a group of another trainer, report each key in it."""
        suggest, holds_keys = self._num_unknown < _SUGGESTIONS, isinstance(node, yaml.MappingNode) and bool(node.value)
        if suggest and holds_keys and is_foreign_group(key[:100]):
            for name, child in _items(document, node):
                self._take(document, f"{key}.{name}", child)
            return
        self._num_unknown += 1
        problem = f"{document.place(node)}: unknown key {shorten(key, 100)}; "
        self.problems.append(problem + (hint(key[:100], holds_keys=holds_keys) if suggest else "correct or remove it"))


def _value(document: Document, node: yaml.Node, hint: Any) -> Any:
    """Return the value of a node for a type. A text field keeps the written text."""
    is_scalar = isinstance(node, yaml.ScalarNode)
    if is_scalar and node.tag == _NULL:
        return None
    for kind in inner_types(hint):
        if is_scalar and (kind is str or get_origin(kind) is Literal or is_group_type(kind)):
            return node.value
        if get_origin(kind) is list and (is_scalar or isinstance(node, yaml.SequenceNode)):
            item = get_args(kind)[0]
            return _value(document, node, item) if is_scalar else [_value(document, one, item) for one in node.value]
        if is_group_type(kind) and isinstance(node, yaml.MappingNode):
            types = {name: inner for name, (inner, _) in describe_keys(kind).items()}
            return {name: _value(document, child, types.get(name, Any)) for name, child in _items(document, node)}
        if get_origin(kind) is dict and isinstance(node, yaml.MappingNode) and get_args(kind)[1] is not Any:
            return {name: _value(document, child, get_args(kind)[1]) for name, child in _items(document, node)}
        if get_origin(kind) is list and isinstance(node, yaml.MappingNode) and is_group_type(get_args(kind)[0]):
            return _value(document, node, get_args(kind)[0])
    return document.value(node)


def _items(document: Document, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    places: dict[str, str] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{document.place(key_node)}: a key must be a name, as in 'seed: 1'")
        key = str(key_node.value)
        if key in places:
            where = f"(also at {places[key]})"
            raise ConfigError(f"{document.place(key_node)}: key {shorten(key)!r} appears twice {where}; keep one")
        places[key] = document.place(key_node)
        yield key, value_node


def _base_files(document: Document, node: yaml.Node) -> list[str]:
    value = _value(document, node, str)
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{document.place(node)}: {BASE_KEY}={shorten(value)} must be a file or a list of files, relative to this file"
        )
    return files
