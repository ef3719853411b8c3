"""Hide secrets in what is shown and saved: configurations, command lines, messages.

A secret is known by its key (``api_key``, ``headers``, the arguments of ``command``), by its origin (a value of ``${oc.env:NAME}``
is shown as it was written), or by its place (logins and queries of addresses, the word after "Bearer"). In any other text it is
known as the value of an environment variable with the name of a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import yaml  # type: ignore[import-untyped]

REDACTED = "<redacted>"
# A key is secret by its last words: "api_key" and "hf_token" are, "prompt_key" and "max_prompt_tokens" are not.
_SECRET_KEY = re.compile(
    r"(^|_)(token|password|passwd|pwd|passphrase|secret|credentials?|webhook|authorization|cookies?|headers?|"
    r"(api|access|private|secret|auth)_?key)$"
)
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]+")  # of apiKey, X-Api-Key
_ARGUMENTS = "command"  # a list: a program, then arguments of any kind
_SECRET_VARIABLE = re.compile(r"(^|_)(tokens?|password|passwd|secrets?|credentials?)(_|$)|key$", re.IGNORECASE)
# What is hidden in a text, and the part of the match that stays.
_IN_TEXT = (
    (re.compile(r"(://)[^/\s?#]+(?=@)"), r"\1"),  # a login
    (re.compile(r"(://[^\s?#'\"<>]*\?)[^\s#'\"<>]+"), r"\1"),  # a query
    (re.compile(r"(://[^\s#'\"]*#)[^\s'\"<>]*=[^\s'\"]*"), r"\1"),  # a fragment with a value
    (re.compile(r"(\bbearer\s+)[\w+/=.~-]{6,}", re.IGNORECASE), r"\1"),
)
_ADDRESS = re.compile(r"\A([a-z][a-z0-9+.-]*://[^?]*\?)(?!<redacted>$).+", re.IGNORECASE | re.DOTALL)
_ADDRESS_KEY = re.compile(r"(^|_)(url|uri|endpoint|address)$")
_SHORTEST = 6  # characters of a variable's value that is looked for in texts; shorter ones would be met by chance


class FromEnvironment(str):
    """A value from the environment. Only the interpolation in its place is shown."""

    shown: str

    def __new__(cls, value: str, shown: str) -> FromEnvironment:
        text = super().__new__(cls, value)
        text.shown = shown
        return text

    def __repr__(self) -> str:
        return repr(self.shown)

    def __reduce__(self) -> tuple[type[FromEnvironment], tuple[str, str]]:
        return FromEnvironment, (str(self), self.shown)  # Ray carries it to engines

    def __deepcopy__(self, memo: object) -> FromEnvironment:
        return self


def redact(value: Any) -> Any:
    """Copy a tree of dicts and lists without values of secret keys and of the environment, and without secrets in addresses."""
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
        words = str(program).split(maxsplit=1)  # a whole command line stands there by mistake
        program = f"{words[0]} {REDACTED}" if len(words) > 1 else redact(program)
        shown = [program, *(_hide(argument, numbers=True) for argument in arguments)]
        return shown[0] if isinstance(value, str) else shown[: len(value)]
    if _ADDRESS_KEY.search(word) and isinstance(value, str) and "?" in value and "://" not in value:
        return f"{value.partition('?')[0]}?{REDACTED}"
    return redact(value)


def _hide(value: Any, *, numbers: bool) -> Any:
    """Hide secrets. ``numbers``: a number is a secret too, and no count."""
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
    """Tell by its name whether an environment variable holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def without_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove from a text the logins and queries inside URLs, and the values of environment variables that are named as secrets are."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and is_secret_variable(name):
            text = text.replace(value, f"<redacted: {name}>")
    return _hide_in_text(text)
