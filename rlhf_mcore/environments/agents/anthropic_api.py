"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.environments.agents.client_values import (
    bad_request,
    check_tool_choice,
    content_of,
    make_call,
    make_schema,
    read_arguments,
    read_number,
    read_object,
    read_stops,
    text_of,
)
from rlhf_mcore.environments.agents.dialects import (
    MODEL,
    Body,
    ClientRequest,
    Dialect,
    Part,
    RequestError,
    Stream,
    TurnInput,
    TurnOutput,
    make_id,
)


@dataclass(frozen=True, slots=True)
class Messages(Dialect):
    """POST /v1/messages."""

    def read(self, body: Body) -> ClientRequest:
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise bad_request("messages must be a non-empty list")
        for number, message in enumerate(given):
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
                raise bad_request(f"messages[{number}] needs the role user or assistant")
            messages += _from_blocks(message["role"], message.get("content"), f"messages[{number}]")
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools
        ):
            raise bad_request('tools must be a list of {"name", "description", "input_schema"}')
        choice = read_object(body, "tool_choice").get("type")
        check_tool_choice(choice, (None, "auto", "none"))
        if choice == "none":
            tools = []
        schemas = [make_schema(t["name"], t.get("description"), t.get("input_schema")) for t in tools]
        limit, stops = read_number(body, ("max_tokens",), 2**31), read_stops(body.get("stop_sequences"))
        return ClientRequest([TurnInput(messages, schemas)], 1, limit, stops, bool(body.get("stream")))

    def stream(self, body: Body) -> Stream:
        return MessagesStream(body)

    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
        [one] = said
        return {**self.head(one), "content": self.blocks(one), **self.end(one)}

    def refuse(self, refusal: RequestError) -> Any:
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": refusal.reason}}

    @staticmethod
    def head(said: TurnOutput) -> dict[str, Any]:
        """Return the first fields of an answer."""
        usage = {"input_tokens": said.num_prompt, "output_tokens": len(said.tokens)}
        return {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": MODEL, "usage": usage}

    @staticmethod
    def end(said: TurnOutput) -> dict[str, Any]:
        """Return the fields that explain why a turn ended."""
        reason = {"length": "max_tokens"}.get(said.finish_reason, "end_turn")
        reason = "tool_use" if said.calls else "stop_sequence" if said.stop is not None else reason
        return {"stop_reason": reason, "stop_sequence": said.stop}

    @staticmethod
    def blocks(said: TurnOutput) -> list[dict[str, Any]]:
        """Return the text and the tool calls of a turn as content blocks."""
        blocks: list[dict[str, Any]] = (
            [{"type": "text", "text": said.content}] if said.content or not said.calls else []
        )
        for call in said.calls:
            arguments = read_arguments(call["function"]["arguments"])
            given = arguments if isinstance(arguments, dict) else {}
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        return blocks


class MessagesStream(Stream):
    """The events of a streamed Anthropic message. The number of prompt tokens is known only at the end."""

    def _begin(self) -> Iterator[Part]:
        begun = {
            **Messages.head(TurnOutput({"content": ""}, (), "stop", 0)),
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

    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
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


def _from_blocks(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Convert an Anthropic message for chat templates. Tool results become separate messages."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    said, calls, results = list[Any](), list[Any](), list[Any]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if (kind == "text" and isinstance(block.get("text"), str)) or (kind == "image" and role == "user"):
            said.append(block)
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            calls.append(make_call(block.get("id"), block["name"], json.dumps(block.get("input") or {})))
        elif kind == "tool_result" and role == "user":
            result = content_of(block.get("content"), where)
            results.append({"role": "tool", **result, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            raise bad_request(
                f"the content of {where} has a part of type {kind!r:.40}, which is not supported; use text, image, tool_use or "
                "tool_result"
            )
    message = {"role": role, **content_of(said, where)} | ({"tool_calls": calls} if calls else {})
    return results + ([message] if message["content"] or calls or not results else [])
