"""What a reward server is asked and answers, as JSON. Both sides read each other's texts with suspicion.

{"items": [{"data_source", "solution_str", "ground_truth", "extra_info", "prompt", "seed"}, ...]}
{"scores": [{"score": 0.5, "parts": {"format": 1.0}} or {"error": "why there is none"}, ...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MAX_ITEMS = 4096  # of a request
MAX_ITEM_BYTES = 2**23  # of its JSON, the whole conversation of an episode among it
MAX_ANSWER_BYTES = 2**15  # of one score
MAX_ERROR_CHARS = 2000
_MAX_PARTS = 64
_MAX_NAME_CHARS = 100
_MAX_FLOAT32 = 3.4e38  # scores travel as float32


class WireError(ValueError):
    """A text that is not what was agreed on. The message tells what is wrong with it."""


def read_json(text: bytes) -> Any:
    """A JSON text with finite numbers only.

    Raises:
        WireError: it is something else, or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"is not JSON ({str(error) or type(error).__name__}): {excerpt(text)}") from error


def read_answers(value: Any, count: int) -> list[dict[str, Any]]:
    """The scores in a server's answer to ``count`` items, each ``{"score", "parts"}`` or ``{"error"}``.

    Raises:
        WireError: they are not as many, or not finite numbers.
    """
    scores = value.get("scores") if isinstance(value, Mapping) else None
    if not isinstance(scores, list):
        raise WireError("has no list 'scores'")
    if len(scores) != count:
        raise WireError(f"has {len(scores)} scores for {count} responses")
    return [_read_answer(entry, f"scores[{index}]") for index, entry in enumerate(scores)]


def read_items(value: Any) -> list[dict[str, Any]]:
    """The items of a request.

    Raises:
        WireError: they are not what the module's description shows.
    """
    items = value.get("items") if isinstance(value, Mapping) else None
    if not isinstance(items, list):
        raise WireError("has no list 'items'")
    if len(items) > MAX_ITEMS:
        raise WireError(f"has {len(items)} items; {MAX_ITEMS} are the most")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise WireError(f"items[{index}] is no object")
        if not isinstance(item.get("solution_str"), str):
            raise WireError(f"items[{index}] has no text 'solution_str'")
        if not isinstance(item.get("data_source", ""), str) or not isinstance(item.get("prompt", ""), str):
            raise WireError(f"items[{index}]: 'data_source' and 'prompt' have to be texts")
        if not isinstance(item.get("extra_info", {}), Mapping):
            raise WireError(f"items[{index}]: 'extra_info' has to be an object")
    return items


def request_of(items: Sequence[bytes]) -> bytes:
    """The request that asks for the scores of items, each a JSON text."""
    return b'{"items":[' + b",".join(items) + b"]}"


def excerpt(text: bytes) -> str:
    """The beginning of a text, for a message."""
    return repr(text[:200].decode(errors="replace")) + ("..." if len(text) > 200 else "")


def _read_answer(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise WireError(f"{where} is no object")
    if "error" in entry:
        return {
            "error": f"answered {str(entry['error'])[:MAX_ERROR_CHARS]!r}",
            "timeout": entry.get("kind") == "timeout",
        }
    parts = entry.get("parts") or {}
    if not isinstance(parts, Mapping) or len(parts) > _MAX_PARTS:
        raise WireError(f"{where}.parts is no object of at most {_MAX_PARTS} numbers")
    if any(len(name) > _MAX_NAME_CHARS for name in parts):
        raise WireError(f"{where}.parts has a name of more than {_MAX_NAME_CHARS} characters")
    read = {name: _number(value, f"{where}.parts[{name!r}]") for name, value in parts.items()}
    return {"score": _number(entry.get("score"), f"{where}.score"), "parts": read}


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)):
        raise WireError(f"{where} is no number: {str(value)[:80]!r}")
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32 or math.isnan(value):  # compared: float() of a huge int raises
        raise WireError(f"{where} is not finite")
    return float(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
