"""YAML files and ``a.b=c`` overrides -> a typed ``Config``.

Later wins: the files named by ``base:``, the file itself, the overrides. A preset (``algorithm: grpo`` is short for
``algorithm: {preset: grpo}``) fills only keys that are not set. Values may refer to other keys (``${seed}``) and
to the environment (``${oc.env:NAME,default}``); no other resolver is allowed. The value of a text field is the text as it was
written: YAML would turn ``off`` into False, ``1.10`` into 1.1 and ``1e3`` into 1000.0.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.interpolation import MAX_REFERENCES, count_references, examine, interpolated_texts
from rlhf_mcore.config.keys import KEYS, is_group, is_text, item_keys, item_type, table_of, type_name, value_of
from rlhf_mcore.config.other_names import hint, is_foreign_group
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import FromEnvironment, redact_arguments
from rlhf_mcore.config.yaml_text import Document, read_yaml_text
from rlhf_mcore.foreign import shorten

ALLOWED_RESOLVERS = ("oc.env",)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration. Fields that are null for "derived" stay null: see ``derive.resolve``.

    ``path``: a YAML file. A setting in its place (``a.b=c``) is the first of ``overrides``, and no file is read.
    ``without_model``: ``model.path`` need not be set, and is "none" then.

    Raises:
        ConfigError: all unknown keys, wrong types, unresolved or forbidden interpolations and missing values, at once.
    """
    reader = SettingReader()
    if "=" in str(path) and not Path(path).exists():
        overrides = [str(path), *overrides]
    else:
        reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    if without_model and all(setting.value == "???" for setting in reader.settings if setting.key == "model.path"):
        reader.read_override("model.path=none")
    values = _Values(reader.settings)
    problems = reader.problems + [problem for setting in reader.settings for problem in _apply(values, setting)]
    if problems:
        raise ConfigError.many(problems)
    problems = list(_missing(values.unresolved()))
    last = list({setting.key: setting for setting in reader.settings}.values())
    problems += _choose_length(values, reader.settings)
    problems += list(_too_many_references(last)) or [
        problem for setting in last for problem in _unresolved(values, setting)
    ]
    if problems:
        raise ConfigError.many(problems)
    _fill_preset(values)
    cfg = Config()
    for key in values.trees:
        group, name = _owner(cfg, key)
        vars(group)[name] = values.typed(key)
    _mark_environment(cfg, last)
    return cfg


class _Values:
    """The values that are set, in trees of omegaconf, which checks, converts and resolves them.

    Each key has a small tree of its own: to copy the tree of all keys takes longer than all else that is done to a configuration.
    Keys that refer to others need that one, and very many keys are faster in it.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        refers = any(any(interpolated_texts(setting.value)) for setting in settings)
        self._whole = copy.deepcopy(_tree_of_all()) if refers or len(settings) > _MANY else None
        self.trees: dict[str, DictConfig] = {}

    def write(self, key: str, value: Any) -> None:
        if key not in self.trees:
            self.trees[key] = self._whole if self._whole is not None else copy.deepcopy(_tree_of_one(key))
        OmegaConf.update(self.trees[key], self._name(key), value, merge=True)

    def select(self, key: str) -> Any:
        """A value, converted and resolved; a list or a table is one of omegaconf, which converts and resolves its items later."""
        return OmegaConf.select(self.trees[key], self._name(key))

    def typed(self, key: str) -> Any:
        """A value in the types of the schema."""
        value = self.select(key)
        return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value

    def unresolved(self) -> Any:
        """Plain values by key, or as a tree, references as they are written; "???" where a mandatory one is not set."""
        if self._whole is not None:
            return OmegaConf.to_container(self._whole)
        plain: dict[str, Any] = {key: OmegaConf.to_container(tree) for key, tree in self.trees.items()}
        return _mandatory() | {key: value[_ONE] for key, value in plain.items()}

    def _name(self, key: str) -> str:
        return _ONE if self._whole is None else key


_MANY = 100
_ONE = "value"


@cache
def _tree_of_all() -> DictConfig:
    """Built once: omegaconf needs seven times as long to build the tree as to copy it."""
    return OmegaConf.structured(Config)


@cache
def _tree_of_one(key: str) -> DictConfig:
    default = value_of(Config(), key)
    one = field(default_factory=lambda: copy.deepcopy(default))
    return OmegaConf.structured(make_dataclass("One", [(_ONE, KEYS[key], one)]))


@cache
def _mandatory() -> dict[str, Any]:
    cfg = Config()
    return {key: MISSING for key in KEYS if value_of(cfg, key) == MISSING}


def _mark_environment(cfg: Config, settings: Sequence[Setting]) -> None:
    """Let texts that came from the environment, also by way of another key, know how they were written."""
    written = {setting.key: text for setting in settings for text in [setting.value] if any(interpolated_texts(text))}
    marked: set[str] = set()
    texts = {key: list(interpolated_texts(value)) for key, value in written.items()}
    while found := [
        key for key in texts.keys() - marked if any(name in text for text in texts[key] for name in ("oc.env", *marked))
    ]:
        marked.update(found)
    for key in marked:
        group, name = _owner(cfg, key)
        vars(group)[name] = _from_environment(getattr(group, name), written[key])


def _owner(cfg: Config, key: str) -> tuple[Any, str]:
    *groups, name = key.split(".")
    owner: Any = cfg
    for group in groups:
        owner = getattr(owner, group)
    return owner, name


def _from_environment(value: Any, written: Any) -> Any:
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_from_environment(item, text) for item, text in zip(value, written, strict=True)]
    if isinstance(value, str) and isinstance(written, str) and "${" in written:
        return FromEnvironment(value, written)
    return value


def _apply(values: _Values, setting: Setting) -> Iterator[str]:
    """Write one setting; yields what is wrong with it."""
    try:
        if forbidden := sorted(examine(setting.value).resolvers.difference(ALLOWED_RESOLVERS)):
            yield (
                f"{setting.place}: {setting.key}={_shown(setting)} uses the resolver {', '.join(forbidden)}; "
                f"only ${{other.key}} and ${{{ALLOWED_RESOLVERS[0]}:NAME}} are allowed"
            )
            return
        values.write(setting.key, setting.value)
    except OmegaConfBaseException as error:
        expected = type_name(KEYS[setting.key])
        reason = f" ({_first_line(error)})" if "${" in str(setting.value) else ""
        yield f"{setting.place}: {setting.key}={_shown(setting)} is not valid; expected {expected}{reason}"
    except (ValueError, RecursionError) as error:
        yield f"{setting.place}: {setting.key}={_shown(setting)} is not valid: {_first_line(error)}"


def _too_many_references(settings: Sequence[Setting]) -> Iterator[str]:
    """Values that refer to values that refer to others: each step may multiply."""
    references = {setting.key: examine(setting.value).references for setting in settings}
    references = {key: found for key, found in references.items() if found}
    known: dict[str, int] = {}
    for setting in settings:
        if count_references(setting.key, references, known) > MAX_REFERENCES:
            yield (
                f"{setting.place}: {setting.key}={_shown(setting)} refers to more than {MAX_REFERENCES} values, those that they "
                "refer to included; write them out"
            )


def _fill_preset(values: _Values) -> None:
    preset = values.typed("algorithm.preset") if "algorithm.preset" in values.trees else Config().algorithm.preset
    if preset not in PRESETS:
        raise ConfigError(f"algorithm.preset={preset!r} is unknown; choose one of: {', '.join(PRESETS)}")
    for name, value in PRESETS[preset].items():
        if f"algorithm.{name}" not in values.trees:
            values.write(f"algorithm.{name}", value)


def _choose_length(values: _Values, settings: Sequence[Setting]) -> list[str]:
    """Of ``trainer.num_steps`` and ``num_epochs`` the one that was set later decides; in one place there can be one of them only."""
    steps, epochs = (
        max(
            (place for place, setting in enumerate(settings) if setting.key == key and setting.value is not None),
            default=-1,
        )
        for key in (_STEPS, _EPOCHS)
    )
    if steps < 0 or epochs < 0:
        return []
    first, second = (settings[place] for place in (steps, epochs))
    if first.source == second.source:
        return [
            f"{first.place}: {_STEPS}={first.value} and {_EPOCHS}={second.value} both tell how long the run is; remove one of them"
        ]
    if steps > epochs:
        values.write(_EPOCHS, None)
    return []


_STEPS, _EPOCHS = "trainer.num_steps", "trainer.num_epochs"


def _missing(value: Any, key: str = "") -> Iterator[str]:
    """Mandatory keys that are still "???" in an unresolved tree."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}[{index}]")
    elif value == MISSING:
        yield f"{key} is not set; give it a value, as in {key}=..."


def _unresolved(values: _Values, setting: Setting) -> Iterator[str]:
    key = setting.key
    if not any(interpolated_texts(setting.value)):
        return
    try:
        value = values.select(key)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationValidationError:  # its text quotes the value, which may come from the environment
        yield f"{setting.place}: {key}={_shown(setting)} resolves to something that is not {type_name(KEYS[key])}"
    except (OmegaConfBaseException, RecursionError) as error:
        yield f"{setting.place}: {key}={_shown(setting)} does not resolve: {_first_line(error)}"


def _shown(setting: Setting) -> str:
    return shorten(repr(setting.value), 200)


def _first_line(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], 400)


# ----------------------------------------------------------------------------------------------- settings, in their order
MAX_FILES = 32  # a configuration and all that it is based on
BASE_KEY = "base"
_NULL = "tag:yaml.org,2002:null"
_REFERENCE = re.compile(r"\$\{[^:{}]+\}")
_SUGGESTIONS = 20  # looking for the key that a misspelt one means takes milliseconds


@dataclass(frozen=True, slots=True)
class Setting:
    """One key that a user has set. ``place`` is where, for messages ("configs/a.yaml:7", "override")."""

    key: str
    value: Any
    place: str

    @property
    def source(self) -> str:
        """The file, or the command line."""
        return "" if self.place.startswith("override ") else self.place.rpartition(":")[0]


class SettingReader:
    """Collects settings, and problems instead of stopping at the first one."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []
        self.problems: list[str] = []
        self._num_files = self._num_unknown = 0

    def read_file(self, path: Path, chain: tuple[str, ...] = ()) -> None:
        """Take the settings of a file, after those of the files named by its ``base``.

        ``chain`` holds the files that led here. The text of broken files is reported in ``problems``.
        """
        real = os.path.realpath(path)
        if real in chain:
            names = " -> ".join(os.path.basename(name) for name in (*chain, real))
            self.problems.append(f"{path}: {BASE_KEY} files form a cycle ({names}); remove one {BASE_KEY} entry")
            return
        self._num_files += 1
        if self._num_files > MAX_FILES:
            if self._num_files == MAX_FILES + 1:
                self.problems.append(f"{path}: more than {MAX_FILES} files by way of {BASE_KEY}; put them together")
            return
        try:
            document = Document(read_yaml_text(path, "config file"), str(path), is_file=True)
            self._take_document(document, path, (*chain, real))
        except ConfigError as error:
            self.problems.append(str(error))

    def read_override(self, text: str) -> None:
        """Take one ``a.b=c`` of the command line; ``c`` is YAML."""
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

    def _take_document(self, document: Document, path: Path, chain: tuple[str, ...]) -> None:
        if document.root is None:
            return
        if not isinstance(document.root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected keys and values at the top, as in 'seed: 1'")
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
            self.settings.append(Setting(table, value, document.place(node)))
        elif key not in KEYS:
            self._take_unknown(document, key, node)
        elif not is_group(key):
            self._take_leaf(document, key, node)
        elif key == "algorithm" and isinstance(node, yaml.ScalarNode) and not is_null:
            self._take(document, "algorithm.preset", node)
        elif isinstance(node, yaml.MappingNode):
            for name, child in _items(document, node):
                self._take(document, f"{key}.{name}", child)
        elif not is_null:  # an empty group is a group whose keys are all commented out
            names = ", ".join(known for known in KEYS if known.rpartition(".")[0] == key)
            self.problems.append(f"{document.place(node)}: {key} is a group, not a value; set one of its keys: {names}")

    def _take_unknown(self, document: Document, key: str, node: yaml.Node) -> None:
        """Report a key, or those in it where it is no group that a name of ours is near to."""
        suggest, holds_keys = self._num_unknown < _SUGGESTIONS, isinstance(node, yaml.MappingNode) and bool(node.value)
        if suggest and holds_keys and is_foreign_group(key[:100]):
            for name, child in _items(document, node):
                self._take(document, f"{key}.{name}", child)
            return
        self._num_unknown += 1
        problem = f"{document.place(node)}: unknown key {shorten(key, 100)}; "
        self.problems.append(problem + (hint(key[:100], holds_keys=holds_keys) if suggest else "correct or remove it"))

    def _take_leaf(self, document: Document, key: str, node: yaml.Node) -> None:
        node = _written_out(node, KEYS[key])
        unknown = list(_unknown_item_keys(document, key, node))
        if unknown:
            self.problems.extend(unknown)
            return
        items = node.value if isinstance(node, yaml.SequenceNode) else []
        if item_type(KEYS[key]) in (str, int, float) and not all(isinstance(item, yaml.ScalarNode) for item in items):
            self.problems.append(
                f"{document.place(node)}: {key} is a list of single values; write each of them plainly"
            )
            return
        self.settings.append(Setting(key, _value(document, node, KEYS[key]), document.place(node)))


def _written_out(node: yaml.Node, hint: Any) -> yaml.Node:
    """A list with the brackets that a single item may leave out, and its rules with the ``name:`` that may be left out.

    A reference to another key (``${data.train}``) may stand for the whole list.
    """
    is_null = isinstance(node, yaml.ScalarNode) and node.tag == _NULL
    kinds = {get_origin(kind): kind for kind in (hint, *get_args(hint))}
    if is_null or (isinstance(node, yaml.ScalarNode) and _REFERENCE.fullmatch(node.value)):
        return node
    if list in kinds:
        item = item_type(kinds[list])
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        first = next(iter(item_keys(kinds[list])), None)
        named = items if first is None else [_named(one, first) for one in items]
        is_single = not isinstance(node, yaml.MappingNode) or is_dataclass(item)
        return yaml.SequenceNode("tag:yaml.org,2002:seq", named, node.start_mark) if is_single else node
    if dict in kinds and isinstance(node, yaml.MappingNode):
        pairs = [(name, _written_out(value, get_args(kinds[dict])[1])) for name, value in node.value]
        return yaml.MappingNode(node.tag, pairs, node.start_mark)
    return node


def _named(item: yaml.Node, key: str) -> yaml.Node:
    """``final_number`` is short for ``{name: final_number}``, where ``name`` is the first key of such an item."""
    if not isinstance(item, yaml.ScalarNode) or item.tag == _NULL:
        return item
    text = "tag:yaml.org,2002:str"
    pair = (yaml.ScalarNode(text, key, item.start_mark), yaml.ScalarNode(text, item.value, item.start_mark))
    return yaml.MappingNode("tag:yaml.org,2002:map", [pair], item.start_mark)


def _value(document: Document, node: yaml.Node, hint: Any) -> Any:
    """The value of a node that is meant for a field of type ``hint``."""
    if is_text(hint) and isinstance(node, yaml.ScalarNode) and node.tag != _NULL:
        return node.value
    if isinstance(node, yaml.SequenceNode) and item_type(hint) is not None:
        return [_value(document, item, item_type(hint)) for item in node.value]
    return document.value(node)


def _items(document: Document, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    seen: dict[str, str] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{document.place(key_node)}: a key has to be a name, as in 'seed: 1'")
        key = str(key_node.value)
        if key in seen:
            where = f"(also at {seen[key]})"
            raise ConfigError(f"{document.place(key_node)}: key {shorten(key)!r} appears twice {where}; keep one")
        seen[key] = document.place(key_node)
        yield key, value_node


def _unknown_item_keys(document: Document, key: str, node: yaml.Node) -> Iterator[str]:
    allowed = item_keys(KEYS[key])
    if not allowed or not isinstance(node, yaml.SequenceNode):
        return
    for index, item in enumerate(node.value):
        names = [name for name, _ in _items(document, item)] if isinstance(item, yaml.MappingNode) else []
        for name in names:
            if name not in allowed:
                yield f"{document.place(item)}: unknown key {key}[{index}].{shorten(name, 100)}; there are: {', '.join(allowed)}"


def _base_files(document: Document, node: yaml.Node) -> list[str]:
    value = _value(document, node, str)
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{document.place(node)}: {BASE_KEY}={shorten(value)} must be a file, or a list of files, beside this one"
        )
    return files
