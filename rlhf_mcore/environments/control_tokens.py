"""Encode texts of environments. Names of the model's control tokens in such a text are encoded as ordinary text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A private-use character. ``ControlTokens.mark`` inserts it after the first character of a control token's name, so that
# the tokenizer does not encode the name as the token.
CUT = "\ue0ff"


MIN_CHARACTERS = 2**16  # texts up to this length are tokenised even if the context is short


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
