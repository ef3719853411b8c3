"""The APIs that clients speak, as plain values: OpenAI's chat completions, completions and responses, and Anthropic's messages.

How a turn is drawn is the run's to say: temperature, top_p, seeds and penalties of a request are not used, or the policy would learn
from another distribution than it is trained on.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.environments.agents.calls import MODEL, Refused, Said
from rlhf_mcore.environments.agents.contents import content_of, message_of, text_of
from rlhf_mcore.environments.agents.conversation import Asked

MAX_N, MAX_STOPS = 64, 16
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """Hold a request: ``n`` turns for each of ``asked``."""

    asked: Sequence[Asked]
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    streams: bool = False


class Dialect(ABC):
    """One API."""

    @abstractmethod
    def read(self, body: Body) -> Order:
        """Read a request.

        Raises:
            Refused: it is none, or asks for something that no policy in training gives.
        """

    @abstractmethod
    def write(self, body: Body, said: Sequence[Said]) -> Any:
        """Return the answer, a value for JSON."""

    def refuse(self, refusal: Refused) -> Any:
        """Return a refusal, a value for JSON."""
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        return {"error": {"message": refusal.reason, "type": kind, "param": None, "code": refusal.code}}


# ------------------------------------------------------------------------------------------------------ reading of values
def _bad(reason: str) -> Refused:
    return Refused(400, reason)


def _number(body: Body, names: Sequence[str], most: int) -> int | None:
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _bad(f"{name} is {value!r:.40}: it must be a number from 1 to {most}")
        return value
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise _bad(f"stop is {value!r:.80}: it must be a text, or at most {MAX_STOPS} of them")
    return tuple(stops)


def _schemas(tools: Any) -> list[dict[str, Any]]:
    schemas = [] if tools is None else tools
    if not isinstance(schemas, list) or not all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in schemas
    ):
        raise _bad('tools must be a list of {"type": "function", "function": {"name", ...}}')
    return schemas


def _refuse_choice(choice: Any, most: Sequence[Any]) -> None:
    if choice not in most:
        raise _bad(f"tool_choice is {choice!r:.60}: a policy in training decides itself whether it calls a tool")


def _arguments(value: Any) -> Any:
    """Return arguments as templates take them: a table where the text is one."""
    try:
        read = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return value
    return read if isinstance(read, dict) else value


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages of OpenAI's chat API, and return them as a chat template takes them.

    Raises:
        Refused: there are none, or one is no message.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list that is not empty")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise _bad(f"{where} has no role, or none of {', '.join(_ROLES)}")
        role = "system" if message["role"] == "developer" else message["role"]
        own = message_of(role, message.get("content"), where)
        own |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        calls = message.get("tool_calls") or []
        if calls:
            if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
                raise _bad(f'{where}.tool_calls must be a list of {{"id", "function": {{"name", "arguments"}}}}')
            own["tool_calls"] = [
                _call(c.get("id"), c["function"]["name"], c["function"].get("arguments")) for c in calls
            ]
        checked.append(own)
    return checked


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
    )


def _call(number: Any, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": str(number or ""), "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _identity(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


def _usage(said: Sequence[Said]) -> tuple[int, int]:
    return (said[0].num_prompt if said else 0), sum(len(each.tokens) for each in said)


# -------------------------------------------------------------------------------------------------- OpenAI's completions
@dataclass(frozen=True, slots=True)
class Chat(Dialect):
    """POST /v1/chat/completions."""

    def read(self, body: Body) -> Order:
        shape = body.get("response_format") or {"type": "text"}
        if not isinstance(shape, dict) or shape.get("type") != "text":
            raise _bad(f"response_format is {shape!r:.80}: only text is drawn")
        if body.get("top_logprobs"):
            raise _bad("top_logprobs is set: only the logprobs of the tokens that were drawn are known")
        _refuse_choice(body.get("tool_choice"), (None, "auto", "none"))
        tools = [] if body.get("tool_choice") == "none" else _schemas(body.get("tools"))
        asked = Asked(chat_messages(body.get("messages")), tools)
        limit = _number(body, ("max_completion_tokens", "max_tokens"), 2**31)
        return Order(
            [asked], _number(body, ("n",), MAX_N) or 1, limit, _stops(body.get("stop")), bool(body.get("stream"))
        )

    def write(self, body: Body, said: Sequence[Said]) -> Any:
        choices = []
        for number, each in enumerate(said):
            message: dict[str, Any] = {"role": "assistant", "refusal": None}
            message |= {"content": each.content or (None if each.calls else "")}
            message |= {"tool_calls": list(each.calls)} if each.calls else {}
            choices.append(
                {
                    "index": number,
                    "message": message,
                    "logprobs": self.logprobs(body, each),
                    "finish_reason": reason_of(each),
                }
            )
        return {**self.head("chat.completion"), "choices": choices, "usage": openai_usage(said)}

    @staticmethod
    def head(kind: str) -> dict[str, Any]:
        """Return what every part of an answer begins with."""
        return {"id": _identity("chatcmpl-"), "object": kind, "created": int(time.time()), "model": MODEL}

    @staticmethod
    def logprobs(body: Body, said: Said) -> Any:
        """Return those of a turn's tokens, if they are asked for."""
        if not body.get("logprobs"):
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, value in said.tokens
        ]
        return {"content": tokens, "refusal": None}


def reason_of(said: Said) -> str:
    """Return why a turn has ended, in the words of OpenAI."""
    return "tool_calls" if said.calls else said.finish_reason


def openai_usage(said: Sequence[Said]) -> dict[str, int]:
    """Return how many tokens were read and drawn."""
    prompt, drawn = _usage(said)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


@dataclass(frozen=True, slots=True)
class Completions(Dialect):
    """POST /v1/completions: of a text, or of tokens, as they are."""

    def read(self, body: Body) -> Order:
        prompt = body.get("prompt")
        is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_token(item) for item in prompt))
        prompts: Any = [prompt] if is_one else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_N:
            raise _bad(f"prompt must be a text, tokens, or a list of at most {MAX_N} of them")
        for each in prompts:
            if not each or not (isinstance(each, str) or (isinstance(each, list) and all(map(_is_token, each)))):
                raise _bad("prompt is empty, or neither a text nor tokens")
        if body.get("echo") or body.get("suffix"):
            raise _bad("echo and suffix are not offered")
        order = Order(
            [Asked(prompt=each) for each in prompts],
            _number(body, ("n",), MAX_N) or 1,
            _number(body, ("max_tokens",), 2**31),
            _stops(body.get("stop")),
            bool(body.get("stream")),
        )
        if order.n * len(prompts) > MAX_N:
            raise _bad(f"{order.n * len(prompts)} completions are asked for: {MAX_N} at a time")
        return order

    def write(self, body: Body, said: Sequence[Said]) -> Any:
        return {
            **self.head(),
            "choices": [self.choice(body, *each) for each in enumerate(said)],
            "usage": openai_usage(said),
        }

    @staticmethod
    def head() -> dict[str, Any]:
        """Return what every part of an answer begins with."""
        return {"id": _identity("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": MODEL}

    @staticmethod
    def choice(body: Body, number: int, said: Said) -> dict[str, Any]:
        """Return a completion."""
        logprobs = None
        if body.get("logprobs") is not None:
            texts, values = [text for text, _ in said.tokens], [value for _, value in said.tokens]
            logprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
        return {"index": number, "text": said.content, "logprobs": logprobs, "finish_reason": said.finish_reason}


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


# ---------------------------------------------------------------------------------------------------- Anthropic's messages
@dataclass(frozen=True, slots=True)
class Messages(Dialect):
    """POST /v1/messages."""

    def read(self, body: Body) -> Order:
        messages: list[dict[str, Any]] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        given = body.get("messages")
        if not isinstance(given, list) or not given:
            raise _bad("messages must be a list that is not empty")
        for number, message in enumerate(given):
            if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
                raise _bad(f"messages[{number}] has no role, or neither user nor assistant")
            messages += _from_blocks(message["role"], message.get("content"), f"messages[{number}]")
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools
        ):
            raise _bad('tools must be a list of {"name", "description", "input_schema"}')
        choice = body.get("tool_choice") or {}
        _refuse_choice(choice.get("type") if isinstance(choice, dict) else choice, (None, "auto", "none"))
        if choice.get("type") == "none":
            tools = []
        schemas = [_schema(t["name"], t.get("description"), t.get("input_schema")) for t in tools]
        limit = _number(body, ("max_tokens",), 2**31)
        return Order([Asked(messages, schemas)], 1, limit, _stops(body.get("stop_sequences")), bool(body.get("stream")))

    def write(self, body: Body, said: Sequence[Said]) -> Any:
        [one] = said
        return {**self.head(one), "content": self.blocks(one), **self.end(one)}

    def refuse(self, refusal: Refused) -> Any:
        kind = "authentication_error" if refusal.status == 401 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": refusal.reason}}

    @staticmethod
    def head(said: Said) -> dict[str, Any]:
        """Return what an answer begins with."""
        usage = {"input_tokens": said.num_prompt, "output_tokens": len(said.tokens)}
        return {"id": _identity("msg_"), "type": "message", "role": "assistant", "model": MODEL, "usage": usage}

    @staticmethod
    def end(said: Said) -> dict[str, Any]:
        """Return why a turn has ended."""
        reason = {"length": "max_tokens"}.get(said.finish_reason, "end_turn")
        reason = "tool_use" if said.calls else "stop_sequence" if said.stop is not None else reason
        return {"stop_reason": reason, "stop_sequence": said.stop}

    @staticmethod
    def blocks(said: Said) -> list[dict[str, Any]]:
        """Return words and calls of a turn."""
        blocks: list[dict[str, Any]] = (
            [{"type": "text", "text": said.content}] if said.content or not said.calls else []
        )
        for call in said.calls:
            arguments = _arguments(call["function"]["arguments"])
            given = arguments if isinstance(arguments, dict) else {}
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
        return blocks


def _schema(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    own = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": own}


def _from_blocks(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a template that are one of Anthropic's: results of tools are messages of their own."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    said, calls, results = list[Any](), list[Any](), list[Any]()
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if (kind == "text" and isinstance(block.get("text"), str)) or (kind == "image" and role == "user"):
            said.append(block)
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            calls.append(_call(block.get("id"), block["name"], json.dumps(block.get("input") or {})))
        elif kind == "tool_result" and role == "user":
            result = content_of(block.get("content"), where)
            results.append({"role": "tool", **result, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            raise _bad(
                f"the content of {where} has a part of type {kind!r:.40}: the policy reads text, images and results of tools"
            )
    message = {"role": role, **content_of(said, where)} | ({"tool_calls": calls} if calls else {})
    return results + ([message] if message["content"] or calls or not results else [])


# ------------------------------------------------------------------------------------------------------ OpenAI's responses
@dataclass(frozen=True, slots=True)
class Responses(Dialect):
    """POST /v1/responses: each request tells the whole conversation, nothing is stored."""

    def read(self, body: Body) -> Order:
        for name in ("previous_response_id", "conversation", "background"):
            if body.get(name):
                raise _bad(f"{name} is set: nothing is stored here, give the whole conversation in input")
        _refuse_choice(body.get("tool_choice"), (None, "auto", "none"))
        messages: list[dict[str, Any]] = []
        if body.get("instructions"):
            messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not items:
            raise _bad("input must be a text, or a list that is not empty")
        for number, item in enumerate(items):
            _add_item(messages, item, f"input[{number}]")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and t.get("type") == "function" and isinstance(t.get("name"), str) for t in tools
        ):
            raise _bad('tools must be a list of {"type": "function", "name", "parameters"}')
        schemas = [_schema(t["name"], t.get("description"), t.get("parameters")) for t in tools]
        limit = _number(body, ("max_output_tokens",), 2**31)
        return Order([Asked(messages, schemas)], 1, limit, (), bool(body.get("stream")))

    def write(self, body: Body, said: Sequence[Said]) -> Any:
        [one] = said
        output: list[dict[str, Any]] = []
        if one.content or not one.calls:
            part = {"type": "output_text", "text": one.content, "annotations": [], "logprobs": []}
            own = {
                "type": "message",
                "id": _identity("msg_"),
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
            output.append(own)
        for call in one.calls:
            function = call["function"]
            told = {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
            output.append({"type": "function_call", "id": _identity("fc_"), "status": "completed", **told})
        is_cut = one.finish_reason == "length"
        usage = {
            "input_tokens": one.num_prompt,
            "output_tokens": len(one.tokens),
            "total_tokens": one.num_prompt + len(one.tokens),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": _identity("resp_"),
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
    """Add an item of a conversation. Calls follow the words of their turn, and are one message with them."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") in _ROLES:
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append(message_of(role, item.get("content"), where))
    elif kind == "function_call" and isinstance(item.get("name"), str):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = _call(item.get("call_id"), item["name"], item.get("arguments"))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        result = content_of(item.get("output"), where)
        messages.append({"role": "tool", **result, "tool_call_id": str(item.get("call_id") or "")})
    elif kind != "reasoning":
        raise _bad(f"{where} is of type {kind!r:.40}: the policy reads messages, calls and their results")


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
    "/v1/responses": Responses(),
}
