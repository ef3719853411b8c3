"""The schemas of tools that a prompt is rendered with: a JSON file as OpenAI's API takes it."""

from __future__ import annotations

import json
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_bytes

KEY = "environment.tools"
_SHAPE = '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}, ...]'


def read_tools(path: str | None) -> list[dict[str, Any]]:
    """Read the list in a file; [] without one.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if path is None:
        return []
    data = read_bytes(path, limit=2**20, where=f"{KEY}={path}", remedy="correct the path")
    try:
        tools = json.loads(data)
        names = [tool["function"]["name"] for tool in tools if tool["type"] == "function"]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}={path} is no JSON ({error}); write {_SHAPE}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{KEY}={path} is not of the form {_SHAPE}") from error
    if not names or len(names) != len(tools) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{KEY}={path} is not of the form {_SHAPE}")
    return list(tools)
