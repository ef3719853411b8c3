"""OpenAI's Chat Completions and Completions APIs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.environments.agents.client_values import (
    bad_request,
    chat_messages,
    check_tool_choice,
    read_number,
    read_schemas,
    read_stops,
    wants_usage,
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
    count_tokens,
    make_id,
)

MAX_N = 64  # maximum turns per request


@dataclass(frozen=True, slots=True)
class ChatCompletions(Dialect):
    """POST /v1/chat/completions."""

    def read(self, body: Body) -> ClientRequest:
        shape = body.get("response_format") or {"type": "text"}
        if not isinstance(shape, dict) or shape.get("type") != "text":
            raise bad_request(
                f"response_format is {shape!r:.80}: not supported, because it changes the sampling distribution; use text"
            )
        if body.get("top_logprobs"):
            raise bad_request("top_logprobs is set: not supported, because only logprobs of sampled tokens are stored")
        wants_usage(body)
        check_tool_choice(body.get("tool_choice"), (None, "auto", "none"))
        tools = [] if body.get("tool_choice") == "none" else read_schemas(body.get("tools"))
        asked = TurnInput(chat_messages(body.get("messages")), tools)
        limit = read_number(body, ("max_completion_tokens", "max_tokens"), 2**31)
        return ClientRequest(
            [asked],
            read_number(body, ("n",), MAX_N) or 1,
            limit,
            read_stops(body.get("stop")),
            bool(body.get("stream")),
        )

    def stream(self, body: Body) -> Stream:
        return ChatStream(body)

    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
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
        """Return the first fields of every part of an answer."""
        return {"id": make_id("chatcmpl-"), "object": kind, "created": int(time.time()), "model": MODEL}

    @staticmethod
    def logprobs(body: Body, said: TurnOutput) -> Any:
        """Return the logprobs of a turn's tokens if the request asks for them."""
        if not body.get("logprobs"):
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
            for text, value in said.tokens
        ]
        return {"content": tokens, "refusal": None}


class ChatStream(Stream):
    """The events of a streamed chat completion."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._head = ChatCompletions.head("chat.completion.chunk")

    def _chunk(self, number: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> Part:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return None, {**self._head, "choices": [choice]}

    def _opening(self, number: int) -> dict[str, Any]:
        return {} if number in self.sent else {"role": "assistant"}

    def _words(self, number: int, words: str) -> Iterator[Part]:
        yield self._chunk(number, {**self._opening(number), "content": words})

    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
        """See :class:`Stream`. Logprobs are sent with the last text."""
        for number, each in enumerate(said):
            delta = self._opening(number) | {"content": self._rest(number, each)}
            if each.calls:
                delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(each.calls)]
            yield self._chunk(number, delta, ChatCompletions.logprobs(self.body, each))
            yield self._chunk(number, {}, reason=reason_of(each))
        if wants_usage(self.body):
            yield None, {**self._head, "choices": [], "usage": openai_usage(said)}
        yield None, "[DONE]"


@dataclass(frozen=True, slots=True)
class Completions(Dialect):
    """POST /v1/completions: continue a text or tokens."""

    def read(self, body: Body) -> ClientRequest:
        prompt = body.get("prompt")
        is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_token(item) for item in prompt))
        prompts: Any = [prompt] if is_one else prompt
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_N:
            raise bad_request(f"prompt must be a text, a list of tokens, or a list of at most {MAX_N} such prompts")
        for each in prompts:
            if not each or not (isinstance(each, str) or (isinstance(each, list) and all(map(_is_token, each)))):
                raise bad_request("prompt must be a non-empty text or list of tokens")
        if body.get("echo") or body.get("suffix"):
            raise bad_request("echo and suffix are not supported")
        wants_usage(body)
        order = ClientRequest(
            [TurnInput(prompt=each) for each in prompts],
            read_number(body, ("n",), MAX_N) or 1,
            read_number(body, ("max_tokens",), 2**31),
            read_stops(body.get("stop")),
            bool(body.get("stream")),
        )
        if order.n * len(prompts) > MAX_N:
            raise bad_request(f"{order.n * len(prompts)} completions requested; the limit is {MAX_N}")
        return order

    def stream(self, body: Body) -> Stream:
        return CompletionsStream(body)

    def write(self, body: Body, said: Sequence[TurnOutput]) -> Any:
        return {
            **self.head(),
            "choices": [self.choice(body, *each) for each in enumerate(said)],
            "usage": openai_usage(said),
        }

    @staticmethod
    def head() -> dict[str, Any]:
        """Return the first fields of every part of an answer."""
        return {"id": make_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": MODEL}

    @staticmethod
    def choice(body: Body, number: int, said: TurnOutput) -> dict[str, Any]:
        """Return a completion."""
        logprobs = None
        if body.get("logprobs") is not None:
            texts, values = [text for text, _ in said.tokens], [value for _, value in said.tokens]
            logprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
        return {"index": number, "text": said.content, "logprobs": logprobs, "finish_reason": said.finish_reason}


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


class CompletionsStream(Stream):
    """The events of a streamed completion."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._head = Completions.head()

    def _words(self, number: int, words: str) -> Iterator[Part]:
        choice = {"index": number, "text": words, "logprobs": None, "finish_reason": None}
        yield None, {**self._head, "choices": [choice], "usage": None}

    def end(self, said: Sequence[TurnOutput]) -> Iterator[Part]:
        """See :class:`Stream`."""
        for number, each in enumerate(said):
            choice = {**Completions.choice(self.body, number, each), "text": self._rest(number, each)}
            yield None, {**self._head, "choices": [choice], "usage": None}
        if wants_usage(self.body):
            yield None, {**self._head, "choices": [], "usage": openai_usage(said)}
        yield None, "[DONE]"


def reason_of(said: TurnOutput) -> str:
    """Return OpenAI's name for the reason why a turn ended."""
    return "tool_calls" if said.calls else said.finish_reason


def openai_usage(said: Sequence[TurnOutput]) -> dict[str, int]:
    """Return the numbers of prompt and sampled tokens, as OpenAI reports them."""
    prompt, drawn = count_tokens(said)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
