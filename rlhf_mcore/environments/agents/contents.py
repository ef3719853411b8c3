"""Contents of messages, as clients of OpenAI's and Anthropic's APIs write them: texts, and parts with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_mcore.environments.agents.calls import Refused

_IMAGES = ("image_url", "input_image", "image")  # types of parts: of OpenAI's two APIs, and of Anthropic's


def text_of(content: Any, where: str) -> str:
    """Return the text of a content: a text, None, or a list of parts that are texts.

    Raises:
        Refused: it holds anything else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(
                400,
                f"the content of {where} has a part of type {kind!r:.40}: the policy reads text, and images in messages of users and "
                "tools; leave it out",
            )
        texts.append(text)
    return "".join(texts)


def content_of(content: Any, where: str) -> dict[str, Any]:
    """Return the text of a user's or a tool's message as ``content``.

    With images there are the ``texts`` around them, and ``images`` as data URLs, beside it.

    Raises:
        Refused: it holds anything else, or an image that would have to be fetched.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return {"content": text_of(content, where)}
    from rlhf_mcore.data.image_rows import MARK  # few agents show images

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
    """Return a message, with images where they are the user's or a tool's."""
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
        raise Refused(
            400,
            f"the content of {where} has a part of type {part['type']!r} that is no data URL, but {url!r:.60}: nothing is fetched and "
            "no file is read, so give the image itself, data:image/png;base64,...",
        )
    return url
