"""Requests of agents for turns of the policy, and the interface of client APIs that read them and write the answers.

The run decides how turns are sampled. Temperature, top_p, seeds and penalties in requests are ignored. They would change the
distribution that the policy is trained on.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.foreign import is_deeper

MODEL = "policy"  # the model name in answers; names in requests are ignored
MAX_DEPTH = 64  # limit for nested values in a request and in the arguments of a call
NO_PARSER = "the request has tools, but environment.tool_parser is not set, so the policy cannot call them"
Body = Mapping[str, Any]
Part = tuple[str | None, Any]  # name of an event, and a JSON value or a text


class RequestError(Exception):
    """A rejected request, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.code = status, reason, code


class TooDeep(ValueError):
    """Arguments of a call are nested deeper than ``MAX_DEPTH``."""


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


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request: ``n`` turns for each of ``asked``."""

    asked: Sequence[TurnInput]
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    streams: bool = False


class Dialect(ABC):
    """An API that reads requests and writes answers, either whole or as a stream."""

    @abstractmethod
    def read(self, body: Body) -> ClientRequest:
        """Read a request.

        Raises:
            RequestError: the request is malformed, or requests a feature that is not supported in training.
        """

    @abstractmethod
    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
        """Return the whole answer as a JSON value."""

    @abstractmethod
    def stream(self, body: Body) -> Stream:
        """Return the writer of a streamed answer."""

    def refuse(self, refusal: RequestError) -> Any:
        """Return an error as a JSON value."""
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        return {"error": {"message": refusal.reason, "type": kind, "param": None, "code": refusal.code}}


class Stream(ABC):
    """A streamed answer to a request. Turns are numbered as in the whole answer."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.sent: defaultdict[int, str] = defaultdict(str)  # sent text, by turn number

    def say(self, number: int, words: str) -> Iterator[Part]:
        """Yield the events for the next text of a turn."""
        yield from self._words(number, words)
        self.sent[number] += words

    def _rest(self, number: int, said: TurnOutput) -> str:
        """Return the text of a turn that is not sent yet."""
        sent = self.sent[number]
        return said.content[len(sent) :] if said.content.startswith(sent) else ""

    @abstractmethod
    def _words(self, number: int, words: str) -> Iterator[Part]:
        """Yield the events for text that is not in ``sent`` yet."""

    @abstractmethod
    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
        """Yield the remaining events of the answer."""


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


def make_id(kind: str) -> str:
    """Return a random id for an answer."""
    return f"{kind}{secrets.token_hex(12)}"


def count_tokens(said: Sequence[TurnOutput]) -> tuple[int, int]:
    """Return the number of tokens of a prompt, and the number of tokens of its turns."""
    return (said[0].num_prompt if said else 0), sum(len(each.tokens) for each in said)
