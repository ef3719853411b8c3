"""Images in requests of agents. A data URL becomes a digest in the run's image store, then a mark in a rendered text, then tokens.

A template writes the same token for every image. The mark before the token distinguishes conversations with equal texts and
different images.
"""

from __future__ import annotations

import base64
import io
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.image_rows import MARK
from rlhf_mcore.environments.agents.dialects import RequestError, TurnInput

if TYPE_CHECKING:
    from rlhf_mcore.data.image_rows import ImageReader
    from rlhf_mcore.environments.agents.tree import TokenTree
    from rlhf_mcore.types import Prompt


def take_images(asked: TurnInput, images: RequestImages | None) -> TurnInput:
    """Return a request with digests instead of data URLs. ``images`` is None if the model reads no images.

    Raises:
        RequestError: the model reads no images, the request has too many images, or an image cannot be used.
    """
    urls = [url for message in asked.messages for url in message.get("images", ())]
    if not urls:
        return asked
    if images is None:
        raise RequestError(400, "messages have images, but the model reads no images")
    digests = iter(images.take(urls))
    messages = [
        {**message, "images": [next(digests) for _ in message["images"]]} if "images" in message else message
        for message in asked.messages
    ]
    return replace(asked, messages=messages)


@dataclass(slots=True)
class RequestImages:
    """The images in requests to one engine. They are kept in the run's image store."""

    reader: ImageReader
    _mark: str = field(init=False, default_factory=lambda: f"image-{secrets.token_hex(8)}-")  # clients cannot guess it

    def take(self, urls: Sequence[str]) -> tuple[str, ...]:
        """Read data URLs into the store. Returns their digests.

        Raises:
            RequestError: there are too many images, an image cannot be used, or the model supports images in prompts only.
        """
        assert all(url.startswith("data:") for url in urls), "nothing else is read from requests"
        if self.reader.writes_around:
            raise RequestError(400, "messages have images, but images of this model are supported in prompts only")
        try:
            return self.reader.take(urls, Path(), "the messages")
        except ConfigError as error:
            raise RequestError(400, str(error)) from error

    def parts(self, message: Mapping[str, Any], mark: Callable[[str], str]) -> list[dict[str, str]]:
        """Return the content of a message with images for a template, with a mark before each image.

        ``mark`` marks the names of control tokens in the texts.
        """
        texts = [mark(text) for text in message["texts"]]
        parts = []
        for text, digest in zip(texts, message["images"], strict=False):
            parts += [{"type": "text", "text": f"{text}{self._mark}{digest};"}, {"type": "image"}]
        return [*parts, {"type": "text", "text": texts[-1]}] if texts[-1] else parts

    def unmark(self, text: str) -> tuple[str, tuple[str, ...]]:
        """Return a rendered text without marks, and the digests in the marks."""
        pieces = re.split(f"{self._mark}([0-9a-f]+);", text)
        return "".join(pieces[::2]), tuple(pieces[1::2])

    def expand(self, tokens: list[int], images: Sequence[str]) -> list[int]:
        """Return the tokens of a text, with the tokens of its images inserted.

        Raises:
            ConfigError: the number of image tokens in the text differs from the number of images.
        """
        return self.reader.expand(tokens, images, "the messages") if images else tokens

    def are_of(self, tokens: Sequence[int], images: Sequence[str]) -> bool:
        """Return whether ``tokens`` contains exactly the image tokens of ``images``."""
        token_id = self.reader.tokens.token_id
        return tokens.count(token_id) == len(self.reader.expand([token_id] * len(images), images, "the messages"))

    def are_drawn(self, tree: TokenTree) -> bool:
        """Return whether the policy sampled an image token in the episode."""
        return any((node.turn.token_ids == self.reader.tokens.token_id).any() for node in tree.nodes)

    def task(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the task fields for a prompt with images: ``images``, their files, and ``messages`` with data URLs."""
        files = self.reader.files(prompt.images)
        if messages is None:
            return {"images": files}
        urls = iter([_data_url(Path(file).read_bytes()) for file in files])
        shown = [{**message, "content": _to_content_parts(message["content"], urls)} for message in messages]
        return {"images": files, "messages": shown}


def _to_content_parts(content: str, urls: Iterator[str]) -> Any:
    """Return a text with image marks as content parts of OpenAI's API; a text without marks unchanged."""
    first, *others = content.split(MARK)
    if not others:
        return content
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image_url", "image_url": {"url": next(urls)}}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def _data_url(content: bytes) -> str:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        kind = Image.MIME[str(image.format)]
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
