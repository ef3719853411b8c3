"""Encode observations between the chat template's markers, after sampled tokens, which are never tokenised again.

Names of the model's control tokens in a text of an environment are encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.rendering import in_child
from rlhf_mcore.data.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.environments.function_worker import FunctionTurn
    from rlhf_mcore.types import Completion, Prompt

Messages = Sequence[Mapping[str, Any]]  # a message with images has "texts", the texts around the images
REMEDY = (
    "use a template that does not change earlier turns, or set environment.rewritten_history=keep, which continues from the sampled "
    "tokens"
)
# A private-use character. ``ControlTokens.mark`` inserts it after the first character of a control token's name, so that
# the tokenizer does not encode the name as the token.
CUT = "\ue0ff"
MIN_CHARACTERS = 2**16  # texts up to this length are tokenised even if the context is short


def _stand_in(number: int) -> str:
    """Return a placeholder content that no template changes, so that it can be found in the rendered text."""
    return f"standin{number}in"


class TurnText:
    """Encode observations, and decode sampled tokens.

    The template is applied once for each sequence of roles, to placeholders. Contents then replace the placeholders.

    Args:
        mode: ``data.apply_chat_template``. With "false", or without a chat template, observations are plain text.
        keep: whether to continue from the sampled tokens if the template would rewrite an earlier turn in the history.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: str = "auto", *, keep: bool = False) -> None:
        self.tokenizer, self._keep = tokenizer, keep
        self._plain = tokenizer.chat_template is None or mode == "false"
        self._control = ControlTokens(tokenizer)
        self._pieces: dict[tuple[tuple[str, ...], bool], tuple[str, list[str]]] = {}
        self._of_image: str | None = None

    def text_of(self, tokens: NDArray[np.int32]) -> str:
        """Decode tokens, without special tokens."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def written_text_of(self, turn: Completion) -> str:
        """Decode the policy's turn with its special tokens, except the token that ends the turn."""
        tokens = turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def plain_tokens(self, text: str) -> list[int]:
        """Encode a text. Names of control tokens in it are encoded as text.

        Raises:
            UnreadableText: the tokenizer cannot split it.
        """
        return self._control.encode(["", ""], [text])

    def conversation_tokens(self, messages: Messages) -> list[int]:
        """Encode a conversation in the chat template, with the start of the policy's turn at its end.

        Raises:
            ConfigError: the template rejects the messages.
            UnreadableText: the tokenizer cannot split the messages.
        """
        [text] = self._render(([{**message, "content": self._content(message)} for message in messages], True))
        return self._control.encode_marked(text)

    def opening(self, prompt: Prompt, messages: Messages, *, special: bool = False) -> tuple[list[int], str]:
        """Render a prompt followed by a first observation. Returns its tokens and its text.

        ``special``: whether names of special tokens in the messages are encoded as these tokens.

        Raises:
            ConfigError: the template rejects the messages.
            UnreadableText: the tokenizer cannot split the messages.
        """
        pieces = [""] * (len(messages) + 1)
        before = prompt.text
        if not self._plain:
            marker, around = self._between(_roles(messages), first=True)
            if prompt.text.endswith(marker):
                before, pieces = prompt.text.removesuffix(marker), around
        pieces = [before + pieces[0], *pieces[1:]]
        return self._encode(pieces, messages, special), _fill(*self._with_images(pieces, messages))

    def after(self, completion: Completion | FunctionTurn, messages: Messages, *, special: bool = False) -> list[int]:
        """Encode the tokens between two turns of the policy: ``messages``, and before them the turn's end if it was not sampled.

        ``special``: whether names of special tokens in the messages are encoded as these tokens.

        Raises:
            ConfigError: the template rejects the messages, or rewrites an earlier turn.
            UnreadableText: the tokenizer cannot split the messages.
        """
        if self._plain:
            return self._encode([""] * (len(messages) + 1), messages, special)
        _, pieces = self._between(_roles(messages), first=False)
        tokens = self._encode(pieces, messages, special)
        ended = completion.finish_reason == "stop" and tokens[:1] == [int(completion.token_ids[-1])]
        return tokens[1:] if ended else tokens

    def _encode(self, pieces: Sequence[str], messages: Messages, special: bool) -> list[int]:
        pieces, contents = self._with_images(pieces, messages)
        if special:
            return token_ids(self.tokenizer, [_fill(pieces, contents)])[0]
        return self._control.encode(pieces, contents)

    def _with_images(self, pieces: Sequence[str], messages: Messages) -> tuple[list[str], list[str]]:
        """Return the pieces of the template and the texts between them, with an additional piece for each image."""
        around, contents = list[str](), list[str]()
        for piece, message in zip(pieces, messages, strict=False):
            texts = message.get("texts") or [message["content"]]
            around += [piece, *[self._image() for _ in texts[1:]]]
            contents += texts
        return [*around, pieces[-1]], contents

    def _content(self, message: Mapping[str, Any]) -> Any:
        """Return the content of a message for a template. Names of control tokens in it are marked."""
        first, *others = [self._control.mark(text) for text in message.get("texts") or [message["content"]]]
        if not others:
            return first
        parts = [{"type": "text", "text": first}]
        for text in others:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]

    def _image(self) -> str:
        """Return the text that the template writes for an image, with a single image token."""
        if self._of_image is None:
            if self._plain:
                raise UnreadableText("returned an image, which only a chat template can write")
            parts = [{"type": "text", "text": _stand_in(0)}, {"type": "image"}, {"type": "text", "text": _stand_in(1)}]
            [text] = self._render(([{"role": "user", "content": parts}], False))
            self._of_image = text.partition(_stand_in(0))[2].partition(_stand_in(1))[0]
        return self._of_image

    def _between(self, roles: tuple[str, ...], *, first: bool) -> tuple[str, list[str]]:
        """Return the generation prompt at the end of a prompt, and the texts around the contents of messages with ``roles``.

        ``first``: whether the messages follow the prompt; otherwise they follow a turn of the policy, and the first text is "".
        """
        known = self._pieces.get((roles, first))
        if known is None:
            known = self._pieces[roles, first] = self._opening(roles) if first else self._following(roles)
        return known

    def _opening(self, roles: tuple[str, ...]) -> tuple[str, list[str]]:
        added = [{"role": role, "content": _stand_in(place)} for place, role in enumerate(roles, start=1)]
        prompt = [{"role": "user", "content": _stand_in(0)}]
        closed, asked, whole = self._render((prompt, False), (prompt, True), ([*prompt, *added], True))
        if not asked.startswith(closed) or not whole.startswith(closed):
            raise ConfigError(
                f"{self._template_name}: it changes the text of a prompt when messages follow it; {REMEDY}"
            )
        return asked.removeprefix(closed), self._split(whole.removeprefix(closed), roles)

    def _following(self, roles: tuple[str, ...]) -> tuple[str, list[str]]:
        added = [{"role": role, "content": _stand_in(place)} for place, role in enumerate(roles, start=1)]
        prompt = {"role": "user", "content": _stand_in(0)}
        endings: list[str] = []
        for said in ("turnofpolicy", "<think>\nthought\n</think>\n\nturnofpolicy"):
            turns = [prompt, {"role": "assistant", "content": said}]
            asked, closed, whole = self._render(([prompt], True), (turns, False), ([*turns, *added], True))
            if not self._keep and not (closed.startswith(asked + said) and whole.startswith(closed)):
                raise ConfigError(
                    f"{self._template_name}: it changes the text of earlier turns when messages of {', '.join(roles) or 'no role'} "
                    f"follow ({said!r} became {whole!r:.400}), so the policy would train on a history that it never sees; {REMEDY}"
                )
            endings.append(whole.rpartition("turnofpolicy")[2])
        return "", self._split(endings[0], roles)

    def _render(self, *conversations: tuple[list[dict[str, Any]], bool]) -> list[str]:
        answers = list(in_child(self._apply, conversations))
        for answer, (messages, _) in zip(answers, conversations, strict=False):
            if "error" in answer:
                roles = ", ".join(message["role"] for message in messages)
                raise ConfigError(
                    f"{self._template_name} rejects messages of the roles {roles}: {answer['error']}. Return messages of roles that "
                    "the template supports"
                )
        return [answer["text"] for answer in answers]

    def _apply(self, conversation: tuple[Any, bool]) -> str:
        messages, asks = conversation
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))

    def _split(self, text: str, roles: tuple[str, ...]) -> list[str]:
        pieces = []
        for place in range(1, len(roles) + 1):
            before, mark, text = text.partition(_stand_in(place))
            if not mark:
                raise ConfigError(
                    f"{self._template_name} leaves out a message of the role {roles[place - 1]}; use another role"
                )
            pieces.append(before)
        return [*pieces, text]

    @property
    def _template_name(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path}"


def _roles(messages: Messages) -> tuple[str, ...]:
    return tuple(message["role"] for message in messages)


def _fill(pieces: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(piece + content for piece, content in zip(pieces, [*contents, ""], strict=True))


def most_characters(max_tokens: int) -> int:
    """Return the maximum number of characters of a text that is tokenised for a sequence of ``max_tokens``.

    Text uses about 4 characters per token, runs of spaces up to 16. A longer text does not fit into the sequence.
    """
    return max(MIN_CHARACTERS, 16 * max_tokens)


class UnreadableText(ValueError):
    """A text that the tokenizer cannot split."""


class ControlTokens:
    """The tokens that structure a conversation: special tokens, and other added tokens that the chat template writes.

    A page that a tool returns may contain ``<|im_end|>``. Encoded as the token, it would end the message, and the page could
    start a message of the user.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template or "")
        texts = set(map(str, tokenizer.all_special_tokens))
        texts |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special or str(t) in template}
        texts = {text for text in texts if text.strip()}
        known = {int(tokenizer.convert_tokens_to_ids(text)) for text in texts}
        self._ids = known - {tokenizer.unk_token_id}  # any unknown character is encoded as this id
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, pieces: Sequence[str], contents: Sequence[str]) -> list[int]:
        """Encode ``pieces`` with ``contents`` between them. Only the pieces produce control tokens.

        Raises:
            UnreadableText: the tokenizer cannot split a content.
        """
        try:
            whole = token_ids(self._tokenizer, ["".join(map("".join, zip(pieces, [*contents, ""], strict=True)))])[0]
            if not any(map(self._pattern.search, contents)):
                [own] = token_ids(self._tokenizer, ["x".join(pieces)])
                if self._count(whole) == self._count(own):  # else normalisation made a token of a content
                    return whole
            tokens = list[int]()
            for piece, content in zip(pieces, [*contents, ""], strict=True):
                tokens += token_ids(self._tokenizer, [piece])[0] + self._as_text(content)
            return tokens
        except (ConfigError, TypeError, ValueError) as error:
            raise UnreadableText(f"returned an observation that cannot be encoded: {error}") from error

    def mark(self, content: str) -> str:
        """Mark the names of control tokens in a content, before a template writes it; ``encode_marked`` removes the marks."""
        return self._pattern.sub(lambda name: name[0][:1] + CUT + name[0][1:], content.replace(CUT, "\ufffd"))

    def encode_marked(self, text: str) -> list[int]:
        """Encode a text with marks of ``mark``. Unmarked names of control tokens become these tokens.

        Raises:
            UnreadableText: the tokenizer cannot split it.
        """
        try:
            return [token for part in text.split(CUT) for token in token_ids(self._tokenizer, [part])[0]]
        except (ConfigError, TypeError, ValueError) as error:
            raise UnreadableText(f"the messages cannot be encoded: {error}") from error

    def _count(self, tokens: Sequence[int]) -> int:
        return sum(token in self._ids for token in tokens)

    def _as_text(self, text: str) -> list[int]:
        """Encode a text without control tokens. It is split inside each name of a control token, and each part is encoded alone."""
        parts = []
        while token_text := self._pattern.search(text):
            parts.append(text[: token_text.start() + 1])
            text = text[token_text.start() + 1 :]
        tokens = list[int]()
        for part in [*parts, text]:
            [encoded] = token_ids(self._tokenizer, [part])
            if self._count(encoded):
                letters = token_ids(self._tokenizer, list(part))
                encoded = [token for letter in letters for token in letter if token not in self._ids]
            tokens += encoded
        return tokens
