"""The error type for mistakes that a user can make and correct: in a config, an override or a file that a config names."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 40  # problems in one message; a file of another kind has thousands


def shortened(items: Sequence[object], most: int = 5, separator: str = "; ") -> str:
    """The first ``most`` of them, and how many more there are."""
    more = f"{separator}and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


class ConfigError(ValueError):
    """A user's mistake. Each problem names the field, its value and the remedy.

    ``problems`` holds one line of text (or a few) per mistake, so that a user sees all of them at once.
    """

    def __init__(self, message: str, *, problems: Sequence[str] | None = None) -> None:
        self.problems: list[str] = list(problems) if problems is not None else [message]
        super().__init__(message)

    @classmethod
    def many(cls, problems: Sequence[str]) -> ConfigError:
        """One error for several problems; a single problem is printed without a list around it."""
        assert problems, "ConfigError.many needs at least one problem"
        if len(problems) == 1:
            return cls(problems[0])
        lines = "\n".join("  - " + problem.replace("\n", "\n    ") for problem in problems[:_SHOWN])
        if len(problems) > _SHOWN:
            lines += f"\n  ... and {len(problems) - _SHOWN} more"
        return cls(f"{len(problems)} problems in the configuration:\n{lines}", problems=problems)


class FileProblem(str):
    """A problem of a run, not of a plan: with a file that it needs (weights, tokenizer, prompts, a user's code) or with its engine."""
