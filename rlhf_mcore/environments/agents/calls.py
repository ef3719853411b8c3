"""Carry calls between an endpoint and its driver: one asks for turns of the policy, and gets them or a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_mcore.environments.agents.conversation import Asked

MODEL = "policy"  # its name, whatever a client calls it

NO_PARSER = "tools are given, and environment.tool_parser is not set, so none can be called"


class Refused(Exception):
    """A request that is not answered, with the status of HTTP and the reason."""

    def __init__(self, status: int, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.code = status, reason, code


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of the policy, as a client gets it. ``tokens`` are texts and logprobs. ``stop``: the text that it was cut at."""

    message: Mapping[str, Any]
    tokens: Sequence[tuple[str, float]]
    finish_reason: str  # "stop" or "length"
    num_prompt: int
    stop: str | None = None

    @property
    def content(self) -> str:
        """The words."""
        return str(self.message["content"] or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Calls of tools: {"id", "type", "function": {"name", "arguments"}}."""
        return self.message.get("tool_calls") or ()


@dataclass(slots=True, eq=False)
class Call:
    """Ask for ``n`` turns of the episode ``key``. ``answer`` is called once, from the driver's thread; None as ``asked``: begin again.

    ``gone``: nobody waits for it any more.
    """

    key: int
    asked: Asked | None
    answer: Callable[[list[Said] | Refused], None]
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    gone: bool = False
    hear: Callable[[int, str], None] | None = None  # gets words of turns as they are drawn, from the driver's thread
    asked_at: float = field(default_factory=time.monotonic)
    turns: dict[int, Any] = field(default_factory=dict)  # of the driver: what was drawn, by the ids of requests
