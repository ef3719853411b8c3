"""A configuration as YAML, for ``--print-config`` and the run directory, with secrets taken out."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.schema import Config

REDACTED = "<redacted>"
# A key is secret by its last words: "api_key" and "hf_token" are, "prompt_key" and "max_prompt_tokens" are not.
_SECRET_KEY = re.compile(
    r"(^|_)(token|password|passwd|secret|credentials?|(api|access|private|secret)_?key)$", re.IGNORECASE
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def to_yaml(cfg: Config) -> str:
    """The whole tree in the order of the schema. It loads again as a config file."""
    return str(yaml.safe_dump(redact(asdict(cfg)), sort_keys=False, allow_unicode=True, default_flow_style=False))


def redact(value: Any) -> Any:
    """A copy of a tree of dicts and lists in which values of secret keys, and logins inside URLs, are replaced."""
    if isinstance(value, dict):
        return {key: REDACTED if _is_secret(key, child) else redact(child) for key, child in value.items()}
    if isinstance(value, list):
        return [redact(child) for child in value]
    return _URL_LOGIN.sub(REDACTED, value) if isinstance(value, str) else value


def _is_secret(key: object, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _SECRET_KEY.search(str(key)) is not None
