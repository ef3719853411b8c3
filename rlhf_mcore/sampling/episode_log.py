"""Times of an episode: turns of the policy, tool calls, and the time in which neither was in progress."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_mcore.types import Completion

MAX_ARGUMENTS = 2000  # characters stored of a call's arguments

Interval = tuple[float, float]


@dataclass(slots=True)
class TurnTimes:
    """Seconds from the start of the episode until a turn was requested, sent to the engine, and sampled; nan if not yet."""

    asked: float
    begun: float
    ended: float = float("nan")


@dataclass(slots=True)
class CallTimes:
    """A tool call in the turn of node ``node``. It lasts from the answer with the call to the request with its result."""

    node: int
    name: str
    arguments: str
    begun: float
    ended: float = float("nan")


@dataclass(slots=True)
class EpisodeLog:
    """The times of an episode, measured in the process of the engine."""

    began: float = field(default_factory=time.monotonic)
    unix_time: float = field(default_factory=time.time)
    turns: dict[int, TurnTimes] = field(default_factory=dict)  # by turn number
    calls: dict[str, CallTimes] = field(default_factory=dict)  # by call id
    nodes: dict[int, TurnTimes] = field(default_factory=dict)  # turns in the tree, by node index

    def now(self) -> float:
        """Return the seconds since the episode began."""
        return time.monotonic() - self.began

    def begin_turn(self, number: int, asked_at: float | None = None) -> None:
        """Store the time at which a turn is sent to an engine. ``asked_at``: ``time.monotonic`` of the client's request."""
        now = self.now()
        self.turns[number] = TurnTimes(now if asked_at is None else asked_at - self.began, now)

    def end_turn(self, number: int) -> None:
        """Store the end of a turn."""
        self.turns[number].ended = self.now()

    def add_node(self, node: int, number: int, calls: Iterable[Mapping[str, Any]] = ()) -> None:
        """Store a turn as node ``node``, with its tool calls: {"id", "function": {"name", "arguments"}}."""
        self.nodes[node] = self.turns[number]
        self.add_calls(node, calls)

    def add_calls(self, node: int, calls: Iterable[Mapping[str, Any]]) -> None:
        """Store the start of the tool calls of node ``node``."""
        for place, call in enumerate(calls):
            function = call["function"]
            arguments = str(function.get("arguments") or "")[:MAX_ARGUMENTS]
            key = str(call.get("id") or f"{node}.{place}")
            self.calls.setdefault(key, CallTimes(node, str(function["name"]), arguments, self.now()))

    def answer_calls(self, keys: Iterable[str], at: float | None = None) -> None:
        """Store the end of calls. Unknown calls, and calls that already ended, are ignored."""
        now = self.now() if at is None else at - self.began
        for key in keys:
            call = self.calls.get(key)
            if call is not None and call.ended != call.ended:
                call.ended = max(now, call.begun)

    def begin_step(self, node: int, action: Any) -> None:
        """Store the start of an environment's answer to a turn: as its tool calls, or as a call ``step`` if it has none."""
        calls = action.get("tool_calls") if isinstance(action, Mapping) else None
        named = [{"function": call["function"]} for call in calls or ()]
        self.add_calls(node, named or [{"function": {"name": "step"}}])

    def end_step(self) -> None:
        """Store the end of an environment's answer."""
        self.answer_calls(self.calls)

    def summary(self) -> dict[str, Any]:
        """Return the start and duration of the episode, with the duration split as in ``split_time``."""
        total = self.now()
        drawing = [(turn.begun, turn.ended) for turn in self.turns.values() if turn.ended == turn.ended]
        calling = [(call.begun, call.ended) for call in self.calls.values() if call.ended == call.ended]
        engine, tools = split_time(drawing, calling)
        return {
            "unix_time": self.unix_time,
            "seconds": total,
            "engine_s": engine,
            "tools_s": tools,
            "waiting_s": max(total - engine - tools, 0.0),
        }

    def node_record(self, node: int) -> dict[str, Any]:
        """Return the times of a node and of its tool calls."""
        times = self.nodes[node]
        calls = [
            {"name": call.name, "arguments": call.arguments, "begun_s": call.begun, "ended_s": _none_if_nan(call.ended)}
            for call in self.calls.values()
            if call.node == node
        ]
        return {"asked_s": times.asked, "begun_s": times.begun, "ended_s": _none_if_nan(times.ended), "calls": calls}


def node_texts(context: str, said: str, num_context: int, turn: Completion) -> dict[str, Any]:
    """Return the fields of a node's record other than its times.

    ``context`` is the text of the ``num_context`` tokens before the turn, and ``said`` the text of the turn.
    """
    return {
        "context": context,
        "said": said,
        "num_context": num_context,
        "num_tokens": len(turn.token_ids),
        "num_cached": turn.num_cached,
        "policy_version": turn.versions[0][1],
        "finish_reason": turn.finish_reason,
    }


def linear_record(
    log: EpisodeLog, prompt: str, written: Sequence[Completion | NDArray[np.int32]], texts: Sequence[str]
) -> dict[str, Any]:
    """Return the record of an episode without branches. ``texts`` are the texts of the parts ``written`` after the prompt."""
    nodes: list[dict[str, Any]] = []
    context, num_context = prompt, 0
    for part, text in zip(written, texts, strict=True):
        if isinstance(part, np.ndarray):
            context, num_context = text, len(part)
            continue
        place = len(nodes)
        own = {"parent": place - 1 if place else None, **node_texts(context, text, num_context, part)}
        nodes.append(own | log.node_record(place))
        context, num_context = "", 0
    return {**log.summary(), "nodes": nodes}


def split_time(drawing: Sequence[Interval], calling: Sequence[Interval]) -> tuple[float, float]:
    """Return the seconds in which a turn was sampled, and the seconds in which a tool ran and no turn was sampled."""
    drawn = _length(drawing)
    return drawn, _length([*drawing, *calling]) - drawn


def _length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _none_if_nan(value: float) -> float | None:
    return value if value == value else None
