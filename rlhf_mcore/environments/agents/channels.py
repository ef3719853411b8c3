"""Turns in channels, as gpt-oss writes them (OpenAI's harmony format): thoughts, calls of tools, and what is for the user.

Templates of such models take a turn as ``thinking``, ``tool_calls`` and ``content``, refuse its raw text, and write it in an order of
their own. So a template is given marks in the place of what was sampled. Where it writes all marks of a turn, and ends it as it was
ended, it tells the turn as it was; where it leaves out the thoughts, it does not.
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
    """Hold a turn: its thoughts, and either a call of the tool ``called`` with ``words`` as arguments or words for the user."""

    thoughts: str
    words: str
    called: str | None = None

    @classmethod
    def read(cls, said: str) -> Channels:
        """Read the text of a turn, without its last token. What is cut off may have no words."""
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
        """Return the turn as a client gets it."""
        if self.called is None:
            return {"role": "assistant", "content": self.words, "tool_calls": []}
        function = {"name": self.called, "arguments": self.words}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": function}],
        }

    def marked(self, mark: str) -> dict[str, Any]:
        """Return the turn as a template takes it, with marks that begin with ``mark``."""
        told: dict[str, Any] = {"role": "assistant", "content": f"{mark}words;" if self.called is None else ""}
        if self.thoughts:
            told["thinking"] = f"{mark}thoughts;"
        if self.called is not None:
            function = {"name": self.called, "arguments": f"{mark}words;"}
            told["tool_calls"] = [{"id": "", "type": "function", "function": function}]
        return told

    def end_in(self, text: str, place: int, mark: str, end: str) -> int | None:
        """Return where a template's ``text`` ends to tell this turn, which begins at ``place``; None: it does not tell all of it."""
        words = text.find(f"{mark}words;", place)
        if words < 0 or (self.thoughts and not place <= text.find(f"{mark}thoughts;", place) < words):
            return None
        found = _ENDS.search(text, words)
        return found.start() if found is not None and found[0] == end else None

    def unmarked(self, text: str, mark: str) -> str:
        """Write what was sampled into a text with marks."""
        for name, said in (("words", self.words), ("thoughts", self.thoughts)):
            own = f"{mark}{name};"
            text = text.replace(f'"{own}"', said).replace(own, said)  # arguments are JSON, and no text of it
        return text


def unmark(text: str, turns: Mapping[str, Channels]) -> str:
    """Write what was sampled into a text with marks. ``turns`` by their marks."""
    for mark, turn in turns.items():
        text = turn.unmarked(text, mark)
    return text
