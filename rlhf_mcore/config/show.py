"""A configuration as YAML, for ``--print-config`` and the run directory, and texts for people, with secrets taken out.

A secret is known by its key (``api_key``), by its origin (a value that ``${oc.env:NAME}`` gave is shown as it was written), and, in
any other text, by being the value of an environment variable with the name of a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.schema import Config

REDACTED = "<redacted>"
# A key is secret by its last words: "api_key" and "hf_token" are, "prompt_key" and "max_prompt_tokens" are not.
_SECRET_KEY = re.compile(
    r"(^|_)(token|password|passwd|secret|credentials?|webhook|(api|access|private|secret)_?key)$", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(r"(^|_)(tokens?|password|passwd|secrets?|credentials?)(_|$)|key$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST = 6  # characters of a variable's value that is looked for in texts; shorter ones would be met by chance


class FromEnvironment(str):
    """A value that came from the environment, and the interpolation that it was written as, which is all that is shown of it."""

    shown: str

    def __new__(cls, value: str, shown: str) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.shown = shown
        return made

    def __repr__(self) -> str:
        return repr(self.shown)

    def __reduce__(self) -> tuple[type[FromEnvironment], tuple[str, str]]:
        return FromEnvironment, (str(self), self.shown)  # Ray carries it to engines

    def __deepcopy__(self, memo: object) -> FromEnvironment:
        return self


def to_yaml(cfg: Config) -> str:
    """The whole tree in the order of the schema. It loads again as a config file."""
    return str(yaml.safe_dump(redact(asdict(cfg)), sort_keys=False, allow_unicode=True, default_flow_style=False))


def redact(value: Any) -> Any:
    """A copy of a tree of dicts and lists without the values of secret keys and of the environment, and without logins inside URLs."""
    if isinstance(value, dict):
        return {key: REDACTED if _is_secret(key, child) else redact(child) for key, child in value.items()}
    if isinstance(value, list):
        return [redact(child) for child in value]
    if isinstance(value, FromEnvironment):
        return value.shown
    return str(_URL_LOGIN.sub(REDACTED, value)) if isinstance(value, str) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """``a.b=c`` arguments of a command line, without the values of secret keys and without other secrets."""
    shown = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        secret = bool(equals) and _is_secret(key.strip().rpartition(".")[2], value)
        shown.append(f"{key}={REDACTED}" if secret else without_secrets(argument))
    return shown


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return _SECRET_VARIABLE.search(name) is not None


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text without logins inside URLs, and without the values of environment variables that are named as secrets are."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and is_secret_variable(name):
            text = text.replace(value, f"<redacted: {name}>")
    return _URL_LOGIN.sub(REDACTED, text)


def _is_secret(key: object, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _SECRET_KEY.search(str(key)) is not None
