"""Hide secrets in printed and saved configurations, command lines and messages.

A secret is recognised by its key (``api_key``, ``headers``, the arguments of ``command``), by its origin (a value of
``${oc.env:NAME}`` is shown in that notation), or by its position (logins and queries in addresses, the word after "Bearer"). In other
texts, the values of environment variables with a secret's name are recognised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml  # type: ignore[import-untyped]

REDACTED = "<redacted>"
# The last words of a key decide: "api_key" and "hf_token" are secret, "prompt_key" and "max_prompt_tokens" are not.
_SECRET_KEY = re.compile(
    r"(^|_)(token|password|passwd|pwd|passphrase|secret|credentials?|webhook|authorization|cookies?|headers?|"
    r"(api|access|private|secret|auth)_?key)$"
)
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]+")  # word boundaries, for example in apiKey and X-Api-Key
_ARGUMENTS = "command"  # key of a list with a program and its arguments
_SECRET_VARIABLE = re.compile(r"(^|_)(tokens?|password|passwd|secrets?|credentials?)(_|$)|key$", re.IGNORECASE)
# Patterns of secrets in a text, and the part of the match to keep.
_IN_TEXT = (
    (re.compile(r"(://)[^/\s?#]+(?=@)"), r"\1"),  # a login
    (re.compile(r"(://[^\s?#'\"<>]*\?)[^\s#'\"<>]+"), r"\1"),  # a query
    (re.compile(r"(://[^\s#'\"]*#)[^\s'\"<>]*=[^\s'\"]*"), r"\1"),  # a fragment with a value
    (re.compile(r"(\bbearer\s+)[\w+/=.~-]{6,}", re.IGNORECASE), r"\1"),
)
_ADDRESS = re.compile(r"\A([a-z][a-z0-9+.-]*://[^?]*\?)(?!<redacted>$).+", re.IGNORECASE | re.DOTALL)
_ADDRESS_KEY = re.compile(r"(^|_)(url|uri|endpoint|address)$")
_SHORTEST = 6  # minimum length of values to search in texts; shorter values would match by chance


class FromEnvironment(str):
    """A value from an environment variable. Only its interpolation is shown."""

    shown: str

    def __new__(cls, value: str, shown: str) -> FromEnvironment:
        text = super().__new__(cls, value)
        text.shown = shown
        return text

    def __repr__(self) -> str:
        return repr(self.shown)

    def __reduce__(self) -> tuple[type[FromEnvironment], tuple[str, str]]:
        return FromEnvironment, (str(self), self.shown)  # Ray sends it to engines

    def __deepcopy__(self, memo: object) -> FromEnvironment:
        return self


def redact(value: Any) -> Any:
    """Return a copy of nested dicts and lists without secrets: values of secret keys, environment values, parts of addresses."""
    if isinstance(value, dict):
        return {key: _redact_value(str(key), child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [redact(child) for child in value]
    if isinstance(value, FromEnvironment):
        return value.shown
    return _hide_in_text(_ADDRESS.sub(rf"\1{REDACTED}", value)) if isinstance(value, str) else value


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return ``a.b=c`` arguments of a command line without the values of secret keys and without other secrets."""
    return [without_secrets(_redact_argument(argument)) for argument in arguments]


def _redact_argument(argument: str) -> str:
    key, equals, text = argument.partition("=")
    try:
        value = yaml.safe_load(text) if equals else None
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    shown = value
    for name in reversed(key.strip().split(".")):
        shown = _redact_value(name, shown)
    if not equals or shown == value:
        return argument
    flow = yaml.safe_dump(
        shown, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    ).strip()
    return f"{key}={shown if isinstance(shown, str) else flow}"


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, FromEnvironment):
        return value.shown
    word = _WORD_ENDS.sub("_", key).lower()
    if _SECRET_KEY.search(word):
        return _hide(value, numbers=not word.endswith("token"))
    if get_close_matches(word, [_ARGUMENTS], cutoff=0.8) and isinstance(value, str | list | tuple):
        program, *arguments = [value] if isinstance(value, str) else value or [""]
        words = str(program).split(maxsplit=1)  # the user may have written a whole command line here
        program = f"{words[0]} {REDACTED}" if len(words) > 1 else redact(program)
        shown = [program, *(_hide(argument, numbers=True) for argument in arguments)]
        return shown[0] if isinstance(value, str) else shown[: len(value)]
    if _ADDRESS_KEY.search(word) and isinstance(value, str) and "?" in value and "://" not in value:
        return f"{value.partition('?')[0]}?{REDACTED}"
    return redact(value)


def _hide(value: Any, *, numbers: bool) -> Any:
    """Return a value with its texts hidden. ``numbers``: hide numbers too, because they are no counts."""
    if isinstance(value, dict):
        return {key: _hide(child, numbers=numbers) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(child, numbers=numbers) for child in value]
    if isinstance(value, FromEnvironment):
        return value.shown
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return REDACTED if (isinstance(value, str) and value) or (numbers and is_number) else value


def _hide_in_text(text: str) -> str:
    for pattern, front in _IN_TEXT:
        text = pattern.sub(rf"{front}{REDACTED}", text)
    return text


def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable indicates a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text without logins and queries in URLs, and without values of environment variables with a secret's name."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and is_secret_variable(name):
            text = text.replace(value, f"<redacted: {name}>")
    return _hide_in_text(text)
