"""The APIs of clients share one interface: read a request, and write its answer, whole or in parts.

The run decides how a turn is sampled. Temperature, top_p, seeds and penalties of a request are not used, or the policy would learn
from another distribution than it is trained on.
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
    """An API: how its requests are read and answered."""

    @abstractmethod
    def read(self, body: Body) -> ClientRequest:
        """Read a request.

        Raises:
            RequestError: it is malformed, or asks for something that a policy in training does not give.
        """

    @abstractmethod
    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
        """Return the whole answer as a JSON value."""

    @abstractmethod
    def stream(self, body: Body) -> Stream:
        """Begin an answer in parts."""

    def refuse(self, refusal: RequestError) -> Any:
        """Return a refusal as a JSON value."""
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        return {"error": {"message": refusal.reason, "type": kind, "param": None, "code": refusal.code}}


class Stream(ABC):
    """The answer to a request in parts. Turns have the numbers of the whole answer."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.sent: defaultdict[int, str] = defaultdict(str)  # by turn

    def say(self, number: int, words: str) -> Iterator[Part]:
        """Yield the next words of a turn."""
        yield from self._words(number, words)
        self.sent[number] += words

    def _rest(self, number: int, said: TurnOutput) -> str:
        """Return the words of a turn that were not sent yet."""
        sent = self.sent[number]
        return said.content[len(sent) :] if said.content.startswith(sent) else ""

    @abstractmethod
    def _words(self, number: int, words: str) -> Iterator[Part]:
        """Yield words, before they are in ``sent``."""

    @abstractmethod
    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
        """Yield the rest of the answer."""


def make_id(kind: str) -> str:
    """Return a random identity of an answer."""
    return f"{kind}{secrets.token_hex(12)}"


def count_tokens(said: Sequence[TurnOutput]) -> tuple[int, int]:
    """Return the numbers of tokens of a prompt and of its turns."""
    return (said[0].num_prompt if said else 0), sum(len(each.tokens) for each in said)
