"""Turns in channels, as gpt-oss writes them (OpenAI's harmony format): thoughts, tool calls, and text for the user.

Templates of such models accept a turn as ``thinking``, ``tool_calls`` and ``content``. They reject its raw text, and write the
parts in their own order. A template therefore gets marks instead of the sampled parts. If it writes all marks of a turn and the
sampled end token, its text reproduces the turn. If it leaves out the thoughts, its text does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHANNEL = "<|channel|>"
_START, _MESSAGE, _ENDS = "<|start|>assistant", "<|message|>", re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Channels:
    """The parts of a turn: its thoughts, and ``words``, which are the arguments of the tool ``called``, or text for the user."""

    thoughts: str
    words: str
    called: str | None = None

    @classmethod
    def read(cls, said: str) -> Channels:
        """Parse the text of a turn, without its last token. A truncated turn may have no words."""
        thoughts, words, called = "", "", None
        for part in said.split(_START):
            header, _, body = part.partition(_MESSAGE)
            body = _ENDS.sub("", body)
            to = _TO.search(header)
            if to is not None:
                words, called = body, to[1]
            elif header.partition(CHANNEL)[2].strip() == "analysis":
                thoughts += body
            else:
                words, called = body, None
        return cls(thoughts, words, called)

    def message(self) -> dict[str, Any]:
        """Return the turn as a message for a client."""
        if self.called is None:
            return {"role": "assistant", "content": self.words, "tool_calls": []}
        function = {"name": self.called, "arguments": self.words}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": function}],
        }

    def to_message(self, mark: str) -> dict[str, Any]:
        """Return the turn as a message for a template, with marks that begin with ``mark`` instead of its parts."""
        told: dict[str, Any] = {"role": "assistant", "content": f"{mark}words;" if self.called is None else ""}
        if self.thoughts:
            told["thinking"] = f"{mark}thoughts;"
        if self.called is not None:
            function = {"name": self.called, "arguments": f"{mark}words;"}
            told["tool_calls"] = [{"id": "", "type": "function", "function": function}]
        return told

    def end_in(self, text: str, place: int, mark: str, end: str) -> int | None:
        """Return the position in a rendered ``text`` at which this turn ends if it starts at ``place``.

        Returns None if the text lacks a part of the turn.
        """
        words = text.find(f"{mark}words;", place)
        if words < 0 or (self.thoughts and not place <= text.find(f"{mark}thoughts;", place) < words):
            return None
        found = _ENDS.search(text, words)
        return found.start() if found is not None and found[0] == end else None

    def replace_marks(self, text: str, mark: str) -> str:
        """Replace the marks in a text by the sampled parts."""
        for name, said in (("words", self.words), ("thoughts", self.thoughts)):
            own = f"{mark}{name};"
            text = text.replace(f'"{own}"', said).replace(own, said)  # a template quotes the mark of arguments as JSON
        return text


def unmark(text: str, turns: Mapping[str, Channels]) -> str:
    """Replace all marks in a text by the sampled parts. ``turns`` maps marks to turns."""
    for mark, turn in turns.items():
        text = turn.replace_marks(text, mark)
    return text
