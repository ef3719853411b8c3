"""Requests of agents for turns of the policy, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.foreign import is_deeper

MODEL = "policy"  # the model name in answers; names in requests are ignored
MAX_DEPTH = 64  # limit for nested values in a request and in the arguments of a call

NO_PARSER = "the request has tools, but environment.tool_parser is not set, so the policy cannot call them"


class RequestError(Exception):
    """A rejected request, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.code = status, reason, code


class TooDeep(ValueError):
    """Arguments of a call are nested deeper than ``MAX_DEPTH``."""


def parse_arguments(arguments: Any) -> Any:
    """Return the JSON value of a call's arguments, or the text if it is not JSON.

    Raises:
        TooDeep: the arguments are nested too deep for templates and JSON writers, which are recursive.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except RecursionError:
        raise TooDeep from None
    except ValueError:
        return arguments
    if is_deeper(value, MAX_DEPTH):
        raise TooDeep
    return value


@dataclass(frozen=True, slots=True)
class TurnInput:
    """The input of a turn: messages for the chat template, or a text or tokens, which are used unchanged.

    A message with images also contains ``texts``, the texts around the images, and ``images``, their data URLs or digests.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """A turn of the policy for a client. ``tokens`` are (text, logprob) pairs. ``stop`` is the stop text that ended the turn."""

    message: Mapping[str, Any]
    tokens: Sequence[tuple[str, float]]
    finish_reason: str  # "stop" or "length"
    num_prompt: int
    stop: str | None = None

    @property
    def content(self) -> str:
        """Return the text of the turn, without its tool calls."""
        return str(self.message["content"] or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Return the tool calls: {"id", "type", "function": {"name", "arguments"}}."""
        return self.message.get("tool_calls") or ()
