"""When what has happened in an episode: turns of the policy, calls of tools, and the time in which neither was under way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlhf_mcore.types import Completion

MAX_ARGUMENTS = 2000  # characters of a call's arguments that are kept

Interval = tuple[float, float]


@dataclass(slots=True)
class TurnTimes:
    """Seconds since the episode began: when a turn was asked for, given to the engine, and drawn. nan: that has not happened."""

    asked: float
    begun: float
    ended: float = float("nan")


@dataclass(slots=True)
class CallTimes:
    """A call of a tool by the turn of node ``node``: from the answer that has it to the request that has its result."""

    node: int
    name: str
    arguments: str
    begun: float
    ended: float = float("nan")


@dataclass(slots=True)
class EpisodeLog:
    """The times of an episode, as the engine's side sees them."""

    began: float = field(default_factory=time.monotonic)
    unix_time: float = field(default_factory=time.time)
    turns: dict[int, TurnTimes] = field(default_factory=dict)  # by the ids of requests
    calls: dict[str, CallTimes] = field(default_factory=dict)  # by their own ids
    nodes: dict[int, TurnTimes] = field(default_factory=dict)  # of turns that are in the tree, by their places

    def now(self) -> float:
        """Seconds since the episode began."""
        return time.monotonic() - self.began

    def begin_turn(self, number: int, asked_at: float | None = None) -> None:
        """Note that an engine is asked for a turn. ``asked_at``: when a client asked, by ``time.monotonic``."""
        now = self.now()
        self.turns[number] = TurnTimes(now if asked_at is None else asked_at - self.began, now)

    def end_turn(self, number: int) -> None:
        """Note that a turn is drawn."""
        self.turns[number].ended = self.now()

    def add_node(self, node: int, number: int, calls: Iterable[Mapping[str, Any]] = ()) -> None:
        """Note that a turn has become node ``node``, with calls of tools: {"id", "function": {"name", "arguments"}}."""
        self.nodes[node] = self.turns[number]
        self.add_calls(node, calls)

    def add_calls(self, node: int, calls: Iterable[Mapping[str, Any]]) -> None:
        """Note that node ``node`` has called tools."""
        for place, call in enumerate(calls):
            function = call["function"]
            arguments = str(function.get("arguments") or "")[:MAX_ARGUMENTS]
            key = str(call.get("id") or f"{node}.{place}")
            self.calls.setdefault(key, CallTimes(node, str(function["name"]), arguments, self.now()))

    def answer_calls(self, keys: Iterable[str], at: float | None = None) -> None:
        """Note that calls have their results. Those that are not known, or have theirs already, are ignored."""
        now = self.now() if at is None else at - self.began
        for key in keys:
            call = self.calls.get(key)
            if call is not None and call.ended != call.ended:
                call.ended = max(now, call.begun)

    def begin_step(self, node: int, action: Any) -> None:
        """Note that an environment answers a turn: with the calls of tools in it, or else as a call of ``step``."""
        calls = action.get("tool_calls") if isinstance(action, Mapping) else None
        named = [{"function": call["function"]} for call in calls or ()]
        self.add_calls(node, named or [{"function": {"name": "step"}}])

    def end_step(self) -> None:
        """Note that an environment has answered."""
        self.answer_calls(self.calls)

    def summary(self) -> dict[str, Any]:
        """Return when the episode began and how long it was, with the parts of that as ``split_time`` has them."""
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
        """Return the times of a node, and its calls."""
        times = self.nodes[node]
        calls = [
            {"name": call.name, "arguments": call.arguments, "begun_s": call.begun, "ended_s": _known(call.ended)}
            for call in self.calls.values()
            if call.node == node
        ]
        return {"asked_s": times.asked, "begun_s": times.begun, "ended_s": _known(times.ended), "calls": calls}


def node_texts(context: str, said: str, num_context: int, turn: Completion) -> dict[str, Any]:
    """Return what a node's record tells beside its times. ``context`` is the text before the turn, of ``num_context`` tokens."""
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
    """Return the record of an episode whose turns follow one another. ``texts``: of what was ``written`` after the prompt."""
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
    """Return the seconds in which a turn was being drawn, and those in which none was and a tool was at work."""
    drawn = _length(drawing)
    return drawn, _length([*drawing, *calling]) - drawn


def _length(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _known(value: float) -> float | None:
    return value if value == value else None
