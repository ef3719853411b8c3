"""OpenAI's Responses API. Nothing is stored, so each request contains the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.environments.agents.client_values import (
    ROLES,
    bad_request,
    check_tool_choice,
    content_of,
    make_call,
    make_schema,
    message_of,
    read_number,
    text_of,
)
from rlhf_mcore.environments.agents.dialects import (
    MODEL,
    Body,
    ClientRequest,
    Dialect,
    Part,
    Stream,
    TurnInput,
    TurnOutput,
    make_id,
)


@dataclass(frozen=True, slots=True)
class Responses(Dialect):
    """POST /v1/responses."""

    def read(self, body: Body) -> ClientRequest:
        for name in ("previous_response_id", "conversation", "background"):
            if body.get(name):
                raise bad_request(f"{name} is set; nothing is stored here, so send the whole conversation in input")
        check_tool_choice(body.get("tool_choice"), (None, "auto", "none"))
        messages: list[dict[str, Any]] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise bad_request("input must be a text or a non-empty list")
        for number, item in enumerate(items):
            _add_item(messages, item, f"input[{number}]")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and t.get("type") == "function" and isinstance(t.get("name"), str) for t in tools
        ):
            raise bad_request('tools must be a list of {"type": "function", "name", "parameters"}')
        schemas = [make_schema(t["name"], t.get("description"), t.get("parameters")) for t in tools]
        limit = read_number(body, ("max_output_tokens",), 2**31)
        return ClientRequest([TurnInput(messages, schemas)], 1, limit, (), bool(body.get("stream")))

    def stream(self, body: Body) -> Stream:
        return ResponsesStream(body)

    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
        [one] = said
        output: list[dict[str, Any]] = []
        if one.content or not one.calls:
            part = {"type": "output_text", "text": one.content, "annotations": [], "logprobs": []}
            own = {
                "type": "message",
                "id": make_id("msg_"),
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
            output.append(own)
        for call in one.calls:
            function = call["function"]
            told = {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
            output.append({"type": "function_call", "id": make_id("fc_"), "status": "completed", **told})
        is_cut = one.finish_reason == "length"
        usage = {
            "input_tokens": one.num_prompt,
            "output_tokens": len(one.tokens),
            "total_tokens": one.num_prompt + len(one.tokens),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": make_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "instructions": body.get("instructions"),
            "metadata": {},
            "model": MODEL,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "usage": usage,
        }


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item of a conversation. Tool calls are part of the message whose text they follow."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append(message_of(role, item.get("content"), where))
    elif kind == "function_call" and isinstance(item.get("name"), str):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = make_call(item.get("call_id"), item["name"], item.get("arguments"))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        result = content_of(item.get("output"), where)
        messages.append({"role": "tool", **result, "tool_call_id": str(item.get("call_id") or "")})
    elif kind != "reasoning":
        raise bad_request(
            f"{where}: item type {kind!r:.40} is not supported; use message, function_call or function_call_output"
        )


class ResponsesStream(Stream):
    """Write the events of a streamed response."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._next = 0
        self._empty = Responses().write(body, [TurnOutput({"content": ""}, (), "stop", 0)])

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

    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
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
