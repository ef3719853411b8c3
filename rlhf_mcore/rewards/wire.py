"""The JSON that travels between a reward server and its clients. Both sides check what they get.

{"items": [{"data_source", "solution_str", "ground_truth", "extra_info", "prompt", "seed"}, ...]}
{"scores": [{"score": 0.5, "parts": {"format": 1.0}} or {"error": "why there is none"}, ...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlhf_mcore.rewards.items import Outcome

MAX_ANSWER_BYTES = 2**15  # of one score
MAX_ERROR_CHARS = 2000
_MAX_PARTS = 64
_MAX_NAME_CHARS = 100
_MAX_FLOAT32 = 3.4e38  # scores travel as float32


class WireError(ValueError):
    """A text that is not as agreed on. The message has what is wrong with it."""


def read_json(text: bytes) -> Any:
    """Parse a JSON text that has finite numbers only.

    Raises:
        WireError: it is something else, or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"is not JSON ({str(error) or type(error).__name__}): {excerpt(text)}") from error


def read_scores(value: Any, count: int) -> list[Outcome]:
    """Read the scores in a server's answer to ``count`` items.

    Raises:
        WireError: they are not as many, or not finite numbers.
    """
    scores = value.get("scores") if isinstance(value, Mapping) else None
    if not isinstance(scores, list):
        raise WireError("has no list 'scores'")
    if len(scores) != count:
        raise WireError(f"has {len(scores)} scores for {count} responses")
    return [_read_score(entry, f"scores[{index}]") for index, entry in enumerate(scores)]


def excerpt(text: bytes) -> str:
    """Shorten a text for a message."""
    return repr(text[:200].decode(errors="replace")) + ("..." if len(text) > 200 else "")


def _read_score(entry: Any, where: str) -> Outcome:
    if not isinstance(entry, Mapping):
        raise WireError(f"{where} is no object")
    if "error" in entry:
        cause = f"answered {str(entry['error'])[:MAX_ERROR_CHARS]!r}"
        return Outcome(lost=cause, timed_out=entry.get("kind") == "timeout")
    parts = entry.get("parts") or {}
    if not isinstance(parts, Mapping) or len(parts) > _MAX_PARTS:
        raise WireError(f"{where}.parts is no object of at most {_MAX_PARTS} numbers")
    if any(len(name) > _MAX_NAME_CHARS for name in parts):
        raise WireError(f"{where}.parts has a name of more than {_MAX_NAME_CHARS} characters")
    numbers = {name: _number(value, f"{where}.parts[{name!r}]") for name, value in parts.items()}
    return Outcome({"score": _number(entry.get("score"), f"{where}.score"), "parts": numbers})


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)):
        raise WireError(f"{where} is no number: {str(value)[:80]!r}")
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32 or math.isnan(value):  # compared: float() of a huge int raises
        raise WireError(f"{where} is not finite")
    return float(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
