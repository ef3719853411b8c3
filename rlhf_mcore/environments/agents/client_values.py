"""Check the values in client requests: messages, their texts and images, tools and tool calls.

Every other value is rejected with an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_mcore.environments.agents.dialects import MAX_DEPTH, Body, RequestError, TooDeep, parse_arguments

MAX_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_IMAGES = ("image_url", "input_image", "image")  # part types of OpenAI's two APIs and of Anthropic's API


def bad_request(reason: str) -> RequestError:
    """Return the error for a malformed request."""
    return RequestError(400, reason)


def read_number(body: Body, names: Sequence[str], most: int) -> int | None:
    """Return the value of the first name that is set, a number from 1 to ``most``; None if all are unset.

    Raises:
        RequestError: the value is not such a number.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise bad_request(f"{name} is {value!r:.40}: it must be a number from 1 to {most}")
        return value
    return None


def read_stops(value: Any) -> tuple[str, ...]:
    """Return the stop texts of a request.

    Raises:
        RequestError: the value is neither a text nor a list of at most ``MAX_STOPS`` texts.
    """
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise bad_request(f"stop is {value!r:.80}: it must be a text, or a list of at most {MAX_STOPS} texts")
    return tuple(stops)


def read_schemas(tools: Any) -> list[dict[str, Any]]:
    """Return the tool schemas of a request, in the format of OpenAI's chat API.

    Raises:
        RequestError: the schemas are malformed.
    """
    schemas = [] if tools is None else tools
    if not isinstance(schemas, list) or not all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in schemas
    ):
        raise bad_request('tools must be a list of {"type": "function", "function": {"name", ...}}')
    return schemas


def check_tool_choice(choice: Any, most: Sequence[Any]) -> None:
    """Reject a tool choice that is not among ``most``."""
    if choice not in most:
        raise bad_request(
            f"tool_choice is {choice!r:.60}: not supported, because the policy decides whether it calls a tool; use auto"
        )


def read_object(body: Body, name: str) -> Mapping[str, Any]:
    """Return the object ``name`` of a request; an empty object if it is missing.

    Raises:
        RequestError: the value is not an object.
    """
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise bad_request(f"{name} is {value!r:.60}: it must be an object")
    return value or {}


def wants_usage(body: Body) -> bool:
    """Return whether the last part of a stream must report token counts."""
    return bool(read_object(body, "stream_options").get("include_usage"))


def read_arguments(value: Any) -> Any:
    """Return the arguments of a call for chat templates: an object if the text is a JSON object, else the text.

    Raises:
        RequestError: the arguments are nested too deep.
    """
    try:
        read = parse_arguments(value)
    except TooDeep:
        raise bad_request(f"the arguments of a call are nested deeper than {MAX_DEPTH}") from None
    return read if isinstance(read, dict) else value


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages of OpenAI's chat API, and return them in the form that chat templates accept.

    Raises:
        RequestError: there is no message, or one is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a non-empty list")
    checked = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise bad_request(f"{where} needs a role, one of {', '.join(ROLES)}")
        role = "system" if message["role"] == "developer" else message["role"]
        own = message_of(role, message.get("content"), where)
        own |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
        calls = message.get("tool_calls") or []
        if calls:
            if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
                raise bad_request(f'{where}.tool_calls must be a list of {{"id", "function": {{"name", "arguments"}}}}')
            own["tool_calls"] = [
                make_call(c.get("id"), c["function"]["name"], c["function"].get("arguments")) for c in calls
            ]
        checked.append(own)
    return checked


def _is_call(call: Any) -> bool:
    return (
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
    )


def make_call(number: Any, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call in the form that chat templates accept."""
    return {
        "id": str(number or ""),
        "type": "function",
        "function": {"name": name, "arguments": read_arguments(arguments)},
    }


def make_schema(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool in the form that chat templates accept."""
    own = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": own}


def text_of(content: Any, where: str) -> str:
    """Return the text of a content, which is a text, None, or a list of text parts.

    Raises:
        RequestError: the content contains anything else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                400,
                f"the content of {where} has a part of type {kind!r:.40}, which is not supported; send text, or images in messages of "
                "users and tools",
            )
        texts.append(text)
    return "".join(texts)


def content_of(content: Any, where: str) -> dict[str, Any]:
    """Return the text of a user or tool message as ``content``.

    If the message has images, the result also contains ``texts``, the texts around the images, and ``images``, their data URLs.

    Raises:
        RequestError: the content contains anything else, or an image that is not a data URL.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return {"content": text_of(content, where)}
    from rlhf_mcore.data.image_rows import MARK  # imported here because few agents send images

    between: list[list[Any]] = [[]]
    for part in content:
        if _is_image(part):
            between.append([])
        else:
            between[-1].append(part)
    texts = [text_of(parts, where) for parts in between]
    images = [_data_url(part, where) for part in content if _is_image(part)]
    return {"content": MARK.join(texts), "texts": texts, "images": images}


def message_of(role: str, content: Any, where: str) -> dict[str, Any]:
    """Return a message in the form that chat templates accept. User and tool messages may contain images."""
    if role in ("system", "assistant"):
        return {"role": role, "content": text_of(content, where)}
    return {"role": role, **content_of(content, where)}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IMAGES


def _data_url(part: Mapping[str, Any], where: str) -> str:
    given = part.get("source" if part["type"] == "image" else "image_url")
    if isinstance(given, dict) and given.get("type") == "base64":
        given = f"data:{given.get('media_type')};base64,{given.get('data')}"
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise RequestError(
            400,
            f"the content of {where} has a part of type {part['type']!r} with {url!r:.60}, which is not an image data URL; the "
            "endpoint reads no URLs and files, so send the image itself, data:image/png;base64,...",
        )
    return url
