"""Graders for the form of a response: a regular expression, its length, its scripts.

Expressions run on RE2 (google-re2), whose run time is linear in the text length for every expression. Python's ``re``
backtracks, so one response could stall the trainer.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.answers import fits

MAX_PATTERN_CHARS = 2000
_COMMAND = re.compile(r"\\[A-Za-z]+")  # LaTeX commands use Latin letters in every language
_WORD = re.compile(r"[^\W\d_]+")


class PatternGrader:
    """Grades 1 if an RE2 regular expression matches anywhere in the response.

    ``^`` and ``$`` match the ends of the whole text, and ``.`` matches any character, including a newline.

    Args:
        pattern: the expression; None: the ground truth of each prompt is the expression.

    Raises:
        ConfigError: the expression is not valid RE2. RE2 does not support look-around and back-references.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = pattern
        if pattern is not None:
            _compile(pattern)

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        pattern = ground_truth if self._pattern is None else self._pattern
        if not isinstance(pattern, str) or not pattern or not fits(response):
            return 0.0
        try:
            return float(_compile(pattern).search(response.encode(errors="replace")) is not None)
        except ConfigError:
            if self._pattern is not None:
                raise
            return 0.0  # the ground truth is not a valid expression; `reward-test` reports it


class LengthGrader:
    """Grades 1 for ``min_chars`` to ``max_chars`` characters; outside linearly less, 0 at a distance of ``margin_chars``."""

    def __init__(self, min_chars: int = 0, max_chars: int | None = None, margin_chars: int = 0) -> None:
        self._min, self._max, self._margin = min_chars, max_chars, margin_chars

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        if not fits(response):
            return 0.0
        distance = max(self._min - len(response), len(response) - (len(response) if self._max is None else self._max))
        if distance <= 0:
            return 1.0
        return max(0.0, 1.0 - distance / self._margin) if self._margin else 0.0


class LanguageGrader:
    """Grades the share of a response's letters that belong to the given scripts; 1 for a response without letters.

    Scripts are distinguished, not languages. English and French both use Latin. Fenced code, LaTeX commands and single Latin
    letters (variables) are ignored.

    Args:
        scripts: Unicode script names, such as Latin, Han, Cyrillic. Japanese uses three: Han, Hiragana, Katakana.

    Raises:
        ConfigError: RE2 does not know a script.
    """

    def __init__(self, scripts: tuple[str, ...] = ("Latin",)) -> None:
        if unknown := [name for name in scripts if not re.fullmatch("[A-Za-z_]+", name)]:
            raise ConfigError(
                f"scripts={unknown} are not script names; use Unicode names, such as Latin, Han or Cyrillic"
            )
        self._letters = _compile("[" + "".join(rf"\p{{{name}}}" for name in scripts) + "]+")

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        if not fits(response):
            return 0.0
        prose = _COMMAND.sub(" ", " ".join(response.split("```")[::2]))
        words = [word for word in _WORD.findall(prose) if len(word) > 1 or not word.isascii()]
        total = sum(map(len, words))
        own = self._letters.findall(" ".join(words).encode(errors="replace"))
        return sum(len(run.decode()) for run in own) / total if total else 1.0


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> Any:
    """Compile an expression over UTF-8 bytes.

    Raises:
        ConfigError: the expression is too long or invalid, or google-re2 is not installed.
    """
    try:
        import re2
    except ImportError as error:
        raise ConfigError("the reward rules 'regex' and 'language' need google-re2: pip install google-re2") from error
    options = re2.Options()
    options.log_errors, options.dot_nl = False, True
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ConfigError(f"the pattern {pattern[:60]!r}... has more than {MAX_PATTERN_CHARS} characters; shorten it")
    try:
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(
            f"the pattern {pattern[:200]!r} is not a valid RE2 expression ({reason}); it supports no look-around or back-references"
        ) from error
