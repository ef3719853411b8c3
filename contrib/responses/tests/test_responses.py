"""The Responses API with OpenAI's client: tools, streams, images, and rejected requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.environments.agents.endpoint import Endpoint
from tests.unit.environments import test_agents as core
from tests.unit.environments import test_images_in_episodes as images
from tests.unit.environments.conftest import tokenizer
from tests.unit.environments.test_agents import chat, endpoint, post, run, texts_of
from tests.unit.environments.test_images_in_episodes import folder, reader

__all__ = ["endpoint", "folder", "reader", "run", "tokenizer"]  # fixtures

HOSTILE = [
    ({"input": "x", "previous_response_id": "r"}, 400, "previous_response_id"),
    ({"input": [{"type": "item_reference"}]}, 400, "item_reference"),
    ({"input": "1" * 70_000}, 400, "its tokens cannot fit"),
]
VALID: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "tool_choice": "auto",
}


@pytest.mark.parametrize("streams", [False, True])
def test_openai_responses_with_a_tool(run: Any, tokenizer: PreTrainedTokenizerBase, streams: bool) -> None:
    tools: Any = [
        {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    ]

    def play(base_url: str, api_key: str) -> float:
        client, items = chat(base_url, api_key), [{"role": "user", "content": "q"}]
        if not streams:
            said = client.responses.create(model="m", input=items, tools=tools, instructions="be brief")
        else:
            with client.responses.stream(model="m", input=items, tools=tools, instructions="be brief") as events:
                for _ in events:
                    pass
                said = events.get_final_response()
        [call] = said.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1}
        call = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        items += [call, {"type": "function_call_output", "call_id": "call_0", "output": "3"}]
        last = client.responses.create(model="m", input=items, tools=tools, instructions="be brief")
        assert last.output_text == "done" and last.status == "completed"
        return 1

    [whole] = run(['call:add:{ "a":1}', "done"], play)
    assert whole.sequences == () and texts_of(whole, tokenizer) == ['call:add:{ "a":1}<end>', "done<end>"]


def test_words_of_a_stream_come_while_they_are_drawn(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def ask(base_url: str, api_key: str) -> Iterator[str]:
        with chat(base_url, api_key).responses.stream(model="m", input="q") as events:
            yield from (event.delta for event in events if event.type == "response.output_text.delta")
            assert events.get_final_response().output_text == core.LONG

    core.check_stream(run, tokenizer, ask)


def test_junk_is_refused_in_one_line(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        for body, status, reason in HOSTILE:
            answer = post(base_url, "responses", json.dumps(body).encode(), api_key)
            message = answer[1]["error"]["message"]
            assert answer[0] == status and reason in message and "\n" not in message, (body, answer)
        assert post(base_url, "responses", b"{}", api_key[:-1])[0] == 401
        assert chat(base_url, api_key).responses.create(model="m", input="q").output_text == "ok"
        return 1

    [whole] = run(["ok"], play)
    assert texts_of(whole, tokenizer) == ["ok<end>"]


def test_no_value_of_another_type_is_an_internal_error_or_cuts_a_stream(endpoint: Endpoint) -> None:
    core.test_no_value_of_another_type_is_an_internal_error_or_cuts_a_stream(endpoint, "responses", VALID)


def test_parts_with_images_are_images(endpoint: Endpoint, reader: ImageReader) -> None:
    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": images.data_url(images.WIDE)}]}]

    def play(ask: Callable[..., Any], task: Any) -> None:
        ask(path="responses", input=shown)

    tokens = images.character_tokenizer([*images.SPECIAL, "<pad>"], "<end>", images.TEMPLATE)
    played = images.Asking(endpoint, tokens, reader, play)
    [wide] = reader.take([images.WIDE], Path(), "here")
    assert [status for status, _ in played.answers] == [200]
    assert [request.images for request in played.engine.requests] == [(wide,)]
