"""Answers in parts, one class for each API: words while they are drawn, and at the end what is left."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_mcore.environments.agents.calls import Said
from rlhf_mcore.environments.agents.dialects import (
    Body,
    Chat,
    Completions,
    Messages,
    Responses,
    openai_usage,
    reason_of,
)

Part = tuple[str | None, Any]  # its name, and a value for JSON, or a text


class Stream(ABC):
    """The answer to one request. Turns are counted as in the answer as a whole."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.sent: defaultdict[int, str] = defaultdict(str)  # by turn

    def say(self, number: int, words: str) -> Iterator[Part]:
        """Yield the next words of a turn."""
        yield from self._words(number, words)
        self.sent[number] += words

    def _rest(self, number: int, said: Said) -> str:
        """Return what is left of a turn's words."""
        sent = self.sent[number]
        return said.content[len(sent) :] if said.content.startswith(sent) else ""

    @abstractmethod
    def _words(self, number: int, words: str) -> Iterator[Part]:
        """Yield words, before they are in ``sent``."""

    @abstractmethod
    def end(self, said: Sequence[Said]) -> Iterator[Part]:
        """Yield the rest of an answer."""


class ChatStream(Stream):
    """Write the events of OpenAI's chat completions."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._head = Chat.head("chat.completion.chunk")

    def _chunk(self, number: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> Part:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return None, {**self._head, "choices": [choice]}

    def _opening(self, number: int) -> dict[str, Any]:
        return {} if number in self.sent else {"role": "assistant"}

    def _words(self, number: int, words: str) -> Iterator[Part]:
        yield self._chunk(number, {**self._opening(number), "content": words})

    def end(self, said: Sequence[Said]) -> Iterator[Part]:
        """See :class:`Stream`. Logprobs come with the last words."""
        for number, each in enumerate(said):
            delta = self._opening(number) | {"content": self._rest(number, each)}
            if each.calls:
                delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(each.calls)]
            yield self._chunk(number, delta, Chat.logprobs(self.body, each))
            yield self._chunk(number, {}, reason=reason_of(each))
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield None, {**self._head, "choices": [], "usage": openai_usage(said)}
        yield None, "[DONE]"


class CompletionsStream(Stream):
    """Write the events of OpenAI's completions."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._head = Completions.head()

    def _words(self, number: int, words: str) -> Iterator[Part]:
        choice = {"index": number, "text": words, "logprobs": None, "finish_reason": None}
        yield None, {**self._head, "choices": [choice], "usage": None}

    def end(self, said: Sequence[Said]) -> Iterator[Part]:
        """See :class:`Stream`."""
        for number, each in enumerate(said):
            choice = {**Completions.choice(self.body, number, each), "text": self._rest(number, each)}
            yield None, {**self._head, "choices": [choice], "usage": None}
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield None, {**self._head, "choices": [], "usage": openai_usage(said)}
        yield None, "[DONE]"


class MessagesStream(Stream):
    """Write the events of Anthropic's messages. How many tokens a prompt has is known at the end."""

    def _begin(self) -> Iterator[Part]:
        begun = {
            **Messages.head(Said({"content": ""}, (), "stop", 0)),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        yield "message_start", {"type": "message_start", "message": begun}

    def _words(self, number: int, words: str) -> Iterator[Part]:
        if number not in self.sent:
            yield from self._begin()
            yield self._start(0, {"type": "text", "text": ""})
        yield self._delta(0, {"type": "text_delta", "text": words})

    @staticmethod
    def _start(place: int, block: Mapping[str, Any]) -> Part:
        return "content_block_start", {"type": "content_block_start", "index": place, "content_block": block}

    @staticmethod
    def _delta(place: int, delta: Mapping[str, Any]) -> Part:
        return "content_block_delta", {"type": "content_block_delta", "index": place, "delta": delta}

    def end(self, said: Sequence[Said]) -> Iterator[Part]:
        """See :class:`Stream`."""
        [one] = said
        has_begun = 0 in self.sent
        if not has_begun:
            yield from self._begin()
        for place, block in enumerate(Messages.blocks(one)):
            if block["type"] == "text":
                if not has_begun:
                    yield self._start(place, {**block, "text": ""})
                yield self._delta(place, {"type": "text_delta", "text": self._rest(0, one)})
            else:
                yield self._start(place, {**block, "input": {}})
                yield self._delta(place, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            yield "content_block_stop", {"type": "content_block_stop", "index": place}
        usage = {"input_tokens": one.num_prompt, "output_tokens": len(one.tokens)}
        yield "message_delta", {"type": "message_delta", "delta": Messages.end(one), "usage": usage}
        yield "message_stop", {"type": "message_stop"}


class ResponsesStream(Stream):
    """Write the events of OpenAI's responses."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._next = 0
        self._empty = Responses().write(body, [Said({"content": ""}, (), "stop", 0)])

    def _event(self, name: str, value: Mapping[str, Any]) -> Part:
        self._next += 1
        return name, {"type": name, "sequence_number": self._next - 1, **value}

    def _begin(self) -> Iterator[Part]:
        begun = {**self._empty, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", {"response": begun})

    def _begin_message(self) -> Iterator[Part]:
        [item] = self._empty["output"]
        empty = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", {"output_index": 0, "item": empty})
        yield self._event("response.content_part.added", {**self._inside(), "part": item["content"][0]})

    def _inside(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": self._empty["output"][0]["id"], "content_index": 0}

    def _words(self, number: int, words: str) -> Iterator[Part]:
        if number not in self.sent:
            yield from self._begin()
            yield from self._begin_message()
        yield self._event("response.output_text.delta", {**self._inside(), "delta": words, "logprobs": []})

    def end(self, said: Sequence[Said]) -> Iterator[Part]:
        """See :class:`Stream`."""
        whole = {**Responses().write(self.body, said), "id": self._empty["id"], "created_at": self._empty["created_at"]}
        has_begun = 0 in self.sent
        if not has_begun:
            yield from self._begin()
        for place, item in enumerate(whole["output"]):
            if item["type"] == "message":
                item["id"] = self._empty["output"][0]["id"]
                if not has_begun:
                    yield from self._begin_message()
                part, inside = item["content"][0], self._inside()
                yield self._event(
                    "response.output_text.delta", {**inside, "delta": self._rest(0, said[0]), "logprobs": []}
                )
                yield self._event("response.output_text.done", {**inside, "text": part["text"], "logprobs": []})
                yield self._event("response.content_part.done", {**inside, "part": part})
            else:
                where = {"output_index": place, "item_id": item["id"]}
                empty = {**item, "status": "in_progress", "arguments": ""}
                yield self._event("response.output_item.added", {"output_index": place, "item": empty})
                yield self._event("response.function_call_arguments.delta", {**where, "delta": item["arguments"]})
                done = {**where, "arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", done)
            yield self._event("response.output_item.done", {"output_index": place, "item": item})
        yield self._event(f"response.{whole['status']}", {"response": whole})


STREAMS: dict[str, type[Stream]] = {
    "/v1/chat/completions": ChatStream,
    "/v1/completions": CompletionsStream,
    "/v1/messages": MessagesStream,
    "/v1/responses": ResponsesStream,
}
