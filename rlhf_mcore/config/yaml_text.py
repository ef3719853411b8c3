"""Read YAML that the user wrote, with the line of each value for messages, and write configurations as YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_text, shorten
from rlhf_mcore.redaction import redact

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config

MAX_BYTES = 2**20  # the longest configuration of ours has 40 kB
# libyaml's parser, which PyYAML's wheels contain, is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_text(path: Path, what: str) -> str:
    """Read the text of a YAML file. Messages begin with ``what`` it is ("config file").

    Raises:
        ConfigError: it is not a readable text of at most ``MAX_BYTES``.
    """
    return read_text(path, limit=MAX_BYTES, where=f"{what} {path}", remedy="correct the path or the file")


class Document:
    """A YAML text with the root of its nodes (None: it is empty). It turns nodes into values and places.

    Raises:
        ConfigError: it is not valid YAML.
    """

    def __init__(self, text: str, name: str, *, is_file: bool = False) -> None:
        self.name = name
        self._is_file = is_file
        try:
            self._loader = _LOADER(text)
            self.root: yaml.Node | None = self._loader.get_single_node()
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape that is no character
            mark = getattr(error, "problem_mark", None)
            place = f"{name}:{mark.line + 1}" if is_file and mark is not None else name
            raise ConfigError(f"{place}: not valid YAML: {_reason(error)}") from error

    def place(self, node: yaml.Node) -> str:
        """Say where a node is, for messages."""
        return f"{self.name}:{node.start_mark.line + 1}" if self._is_file else self.name

    def value(self, node: yaml.Node) -> Any:
        """Return the value of a node.

        Raises:
            ConfigError: it is no plain value.
        """
        try:
            return self._loader.construct_document(node)
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.place(node)}: not a plain value: {_reason(error)}") from error


def load_yaml(text: str, name: str) -> Any:
    """Load the value of a whole YAML text, None if it is empty.

    The parser is PyYAML's own, which raises where libyaml's would overflow the stack: some texts come with a data set.

    Raises:
        ConfigError: it is not valid YAML, or no plain value.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: nested too deep; write it flat") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {_reason(error)}") from error


def to_yaml(cfg: Config) -> str:
    """Write a configuration without its secrets, in the order of the schema. The text loads again as a config file."""
    from rlhf_mcore.config.schema.group import to_dict  # `--help` needs none of the models

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
