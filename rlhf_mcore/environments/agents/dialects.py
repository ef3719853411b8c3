"""The interface of client APIs, which read a request and write its answer, either whole or as a stream.

The run decides how turns are sampled. Temperature, top_p, seeds and penalties in requests are ignored. They would change the
distribution that the policy is trained on.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.environments.agents.calls import RequestError, TurnInput, TurnOutput

Body = Mapping[str, Any]
Part = tuple[str | None, Any]  # name of an event, and a JSON value or a text


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request: ``n`` turns for each of ``asked``."""

    asked: Sequence[TurnInput]
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    streams: bool = False


class Dialect(ABC):
    """An API that reads requests and writes answers."""

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


def make_id(kind: str) -> str:
    """Return a random id for an answer."""
    return f"{kind}{secrets.token_hex(12)}"


def count_tokens(said: Sequence[TurnOutput]) -> tuple[int, int]:
    """Return the number of tokens of a prompt, and the number of tokens of its turns."""
    return (said[0].num_prompt if said else 0), sum(len(each.tokens) for each in said)
