"""The error for mistakes that a user can correct, in a configuration, an override or a file that a configuration names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from traceback import extract_tb

# Control characters except newline and tab, format characters (some reverse the text), surrogates, Unicode line separators.
_CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_SHOWN = 40  # problems in one message, because a file of another format has thousands


def join_first(items: Sequence[object], most: int = 5, separator: str = "; ") -> str:
    """Return the first ``most`` items as text, and the number of the others."""
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def for_terminal(text: str) -> str:
    """Escape the control characters of a text for a terminal, except newlines."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


def printable(text: str) -> str:
    """Return a foreign text on one line without control characters, for a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class ConfigError(ValueError):
    """A user's mistake. Each problem names the field, its value and the remedy.

    ``problems`` contains one or a few lines per mistake, so that a user sees all of them at once. Texts are escaped
    (``for_terminal``), because Python and notebooks print them unchanged.
    """

    def __init__(self, message: str, *, problems: Sequence[str] | None = None) -> None:
        self.problems: list[str] = list(problems) if problems is not None else [message]
        super().__init__(for_terminal(message))

    @classmethod
    def many(cls, problems: Sequence[str]) -> ConfigError:
        """Build one error for several problems. A single problem is printed without a list."""
        assert problems, "ConfigError.many needs at least one problem"
        if len(problems) == 1:
            return cls(problems[0])
        lines = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in problems[:_SHOWN])
        if len(problems) > _SHOWN:
            lines += f"\n  ... and {len(problems) - _SHOWN} more"
        return cls(f"{len(problems)} problems in the configuration:\n{lines}", problems=problems)

    def _render_traceback_(self) -> list[str]:
        """Return the caller's line and the message, which a notebook shows instead of a traceback."""
        package = str(Path(__file__).resolve().parents[1])
        frames = [frame for frame in extract_tb(self.__traceback__) if not frame.filename.startswith(package)]
        own = [frame for frame in frames if "site-packages" not in frame.filename]
        place = [f"line {own[-1].lineno}: {own[-1].line}"] if own else []
        return [*place, f"{type(self).__name__}: {self}"]


class FileProblem(str):
    """A problem with a file of a run (weights, tokenizer, prompts, code) or with its engine. A plan ignores these problems."""
