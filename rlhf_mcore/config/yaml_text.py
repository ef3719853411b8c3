"""Read the user's YAML with the line of each value, for messages, and write configurations as YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.foreign import read_text, shorten
from rlhf_mcore.redaction import redact

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config

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
