"""Convert the messages of a request to tokens. Sampled tokens are reused unchanged; the chat template renders the rest."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError, printable
from rlhf_mcore.data.rendering import in_child
from rlhf_mcore.environments.agents.dialects import RequestError, TooDeep, TurnInput, parse_arguments
from rlhf_mcore.environments.agents.tree import Node, TokenTree, after
from rlhf_mcore.environments.turn_text import CUT, ControlTokens, UnreadableText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.environments.agents.images import RequestImages
    from rlhf_mcore.types import Completion, Prompt

STRAY = "the conversation has an image token without an image, so no image can follow it"
_NO_TEMPLATE = "the tokenizer has no chat template, so messages are not supported; use /v1/completions with a text"
_THOUGHT = "<think>"  # some templates end the generation prompt with it
CHANNEL = "<|channel|>"
_START, _MESSAGE, _ENDS = "<|start|>assistant", "<|message|>", re.compile(r"<\|(?:end|call|return)\|>")
_TO = re.compile(r"to=functions\.([\w.-]+)")
# (text of a turn with special tokens, tool schemas of the request) -> message.
Parse = Callable[[str, Sequence[Mapping[str, Any]]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The place of a request's answer in a tree: after ``parent`` and the tokens of ``context``, whose text is ``text``.

    ``text`` is the text as the template rendered it, including marks; ``shown`` is the text for people. ``images`` are the digests
    of the images in ``context``. ``is_confused``: the policy sampled an image token, so image tokens cannot be assigned to images.
    """

    parent: Node | None
    text: str
    context: list[int]
    num_messages: int = 0
    shown: str | None = None
    images: tuple[str, ...] = ()
    is_confused: bool = False

    def tokens(self) -> list[int]:
        """Return all tokens before the answer."""
        return [*(self.parent.tokens() if self.parent is not None else ()), *self.context]

    def seen(self) -> tuple[str, ...]:
        """Return the digests of all images before the answer."""
        return (*(self.parent.seen() if self.parent is not None else ()), *self.images)


@dataclass(frozen=True, slots=True)
class _ToRender:
    """The turns of the policy among the messages of a request, and the input for the chat template."""

    nodes: list[Node]
    item: dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """The chat template and the tokenizer of a model, for requests of agents.

    ``parse`` finds the tool calls in a turn; None: every turn is plain text. ``images`` reads the images of requests; None: the
    model reads no images.
    """

    tokenizer: PreTrainedTokenizerBase
    parse: Parse | None = None
    images: RequestImages | None = None
    control: ControlTokens = field(init=False)
    _mark: str = field(init=False, default_factory=lambda: f"said-{secrets.token_hex(8)}-")  # clients cannot guess it

    _has_channels: bool = field(init=False)
    _known_ids: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        vocabulary = self.tokenizer.get_vocab()
        self._has_channels = CHANNEL in vocabulary
        self._known_ids = frozenset(vocabulary.values())
        self.control = ControlTokens(self.tokenizer)

    @staticmethod
    def messages_of(prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return a prompt as messages. A text becomes a user message; None if no template is applied to the text."""
        if prompt.messages is not None:
            return prompt.messages
        return None if prompt.question is None else [{"role": "user", "content": prompt.question}]

    def find(self, requests: Sequence[tuple[TokenTree, TurnInput]]) -> list[Continuation | str]:
        """Find the place of each request in its tree, or explain why the request is rejected.

        All requests are rendered in one call of the process that runs the chat template.
        """
        begun = [_contain(self._begin, tree, asked) for tree, asked in requests]
        items = [each.item for each in begun if isinstance(each, _ToRender)]
        rendered = iter(in_child(self._apply, items) if items else ())
        places: list[Continuation | str] = []
        broken = ""
        for (tree, asked), each in zip(requests, begun, strict=True):
            if not isinstance(each, _ToRender):
                places.append(each)
                continue
            answer = next(rendered, None) or {"error": broken}
            broken = answer.get("error", "")
            if broken:
                places.append(f"the chat template rejects these messages: {broken}")
            else:
                places.append(_contain(self._place_rendered, tree, asked, each.nodes, answer["text"]))
        return places

    def _begin(self, tree: TokenTree, asked: TurnInput) -> Continuation | str | _ToRender:
        """Return the place of a request with a text or tokens, or the template's input for a request with messages.

        A text explains why the request is rejected.
        """
        if asked.prompt is not None:
            return self._place_prompt(tree, asked.prompt)
        if self.tokenizer.chat_template is None:
            return _NO_TEMPLATE
        if asked.tools and self.parse is not None:
            try:
                self.parse("", asked.tools)  # builds the parser for these tools, and finds errors in their schemas
            except Exception as error:
                return f"tools cannot be used: {printable(str(error))[:300]}"
        if any("images" in message for message in asked.messages):
            from rlhf_mcore.environments.agents.images import take_images

            try:
                asked = take_images(asked, self.images)
            except RequestError as refusal:
                return refusal.reason
        nodes = tree.follow(_replies(asked))
        return _ToRender(nodes, self._render_messages(asked, nodes))

    def _place_rendered(
        self, tree: TokenTree, asked: TurnInput, nodes: Sequence[Node], text: str
    ) -> Continuation | str:
        node, start = tree.find_shared(text, nodes, self._end_of)
        channels = {self._mark_of(each): Channels.read(each.said) for each in nodes if CHANNEL in each.said}
        return self._encode(Continuation(node, text[start:], [], len(asked.messages)), channels, tree)

    def _mark_of(self, node: Node) -> str:
        return f"{self._mark}{node.place}-"

    def _end_of(self, node: Node, text: str, place: int) -> int | None:
        """Return the position in a text at which a turn ends if it starts at ``place``; None if the text differs from the turn."""
        if CHANNEL not in node.said:
            return after(text, place, node.said)
        return Channels.read(node.said).end_in(text, place, self._mark_of(node), node.end)

    def _place_prompt(self, tree: TokenTree, prompt: str | Sequence[int]) -> Continuation | str:
        if not isinstance(prompt, str):
            node, start = tree.shared_tokens(prompt)
            context = list(prompt[start:])
            unknown = next((token for token in context if token not in self._known_ids), None)
            if unknown is not None:
                return f"token {unknown} is not in the vocabulary of the policy"
            text = str(self.tokenizer.decode(context, skip_special_tokens=False))
            return self._check(Continuation(node, text, context))
        node, start = tree.shared_text(prompt)
        try:
            return self._check(Continuation(node, prompt[start:], self.control.encode_marked(prompt[start:])))
        except UnreadableText as error:
            return str(error)

    def _check(self, place: Continuation) -> Continuation | str:
        """Return the place if an engine can continue it, else the reason.

        It needs at least one token, and an image for each image token.
        """
        if place.parent is None and not place.context:
            return "the prompt is empty: the tokenizer returned no tokens"
        if self.images is not None and not self.images.are_of(place.context, place.images):
            return STRAY
        return place

    def _encode(self, place: Continuation, channels: Mapping[str, Channels], tree: TokenTree) -> Continuation | str:
        """Return the place with the tokens of its text, or the reason why the request is rejected."""
        told, node = unmark(place.text, channels), place.parent
        images: tuple[str, ...] = ()
        if self.images is not None:
            told, images = self.images.unmark(told)
        try:
            context = self.control.encode_marked(told)
        except UnreadableText as error:
            return str(error)
        if node is not None and node.end and context[:1] == [int(node.turn.token_ids[-1])]:
            context = context[1:]  # the end token was sampled, and is part of the node
        place = replace(place, context=context, shown=told.replace(CUT, ""), images=images)
        if self.images is None or not images:
            return self._check(place)
        try:
            if node is None or self.images.are_of(node.tokens(), node.seen()):
                return self._check(replace(place, context=self.images.expand(context, images)))
            problem = STRAY
        except ConfigError as error:
            problem = str(error)
        return replace(place, is_confused=True) if self.images.are_drawn(tree) else problem

    def _render_messages(self, asked: TurnInput, nodes: Sequence[Node]) -> dict[str, Any]:
        """Build the template's input from the messages of a request.

        Messages that are turns of the policy (``nodes``) get the sampled text. In other messages, names of control tokens are marked.
        """
        said = {node.num_messages: node for node in nodes}
        messages = []
        for number, message in enumerate(asked.messages):
            if number in said:
                node = said[number]
                if CHANNEL in node.said:
                    messages.append(Channels.read(node.said).to_message(self._mark_of(node)))
                    continue
                thought = node.text[node.text.rindex(_THOUGHT) :] if node.text.rstrip().endswith(_THOUGHT) else ""
                messages.append({"role": "assistant", "content": thought + node.said})
            elif message["role"] in ("assistant", "system"):
                messages.append(dict(message))
            elif self.images is not None and "images" in message:
                own = {key: value for key, value in message.items() if key not in ("texts", "images")}
                messages.append({**own, "content": self.images.parts(message, self.control.mark)})
            else:
                messages.append({**message, "content": self.control.mark(message["content"])})
        return {"messages": messages, "tools": list(asked.tools)}

    def _apply(self, item: Mapping[str, Any]) -> str:
        template = self.tokenizer.apply_chat_template
        tools = item["tools"] or None
        return str(template(item["messages"], tools=tools, tokenize=False, add_generation_prompt=True))

    def words_of(self, ids: Sequence[int], asked: TurnInput, stops: Sequence[str]) -> str:
        """Return the text of a turn in progress, as far as it is final; "" if the turn may contain tool calls."""
        if (self.parse is not None and asked.tools) or self._has_channels:
            return ""
        words = str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).rstrip("\ufffd")
        if found := [words.index(stop) for stop in stops if stop in words]:
            return words[: min(found)]
        return words[: len(words) - max((len(stop) - 1 for stop in stops), default=0)] if stops else words

    def read(self, turn: Completion, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str, dict[str, Any]]:
        """Return a turn's text with special tokens, the text of its end token ("" if it has none), and its message."""
        ids = turn.token_ids.tolist()
        ends = turn.finish_reason == "stop"
        said = str(self.tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=False))
        end = str(self.tokenizer.decode(ids[-1:], skip_special_tokens=False)) if ends else ""
        message: Mapping[str, Any] | None = None
        if CHANNEL in said:
            message = Channels.read(said).message()
        elif self.parse is not None and tools:
            message = self.parse(said, tools)
        if message is not None and not _are_deep(message.get("tool_calls") or ()):
            return said, end, dict(message)
        content = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return said, end, {"role": "assistant", "content": content, "tool_calls": []}


def num_characters(asked: TurnInput) -> int:
    """Return the number of characters of a request's messages and tools, or the length of its prompt. Images are not counted."""
    if asked.prompt is not None:
        return len(asked.prompt)
    size = len(json.dumps(asked.tools)) if asked.tools else 0
    for message in asked.messages:
        size += len(message["role"]) + len(message["content"] or "")
        size += len(json.dumps(message["tool_calls"])) if "tool_calls" in message else 0
    return size


def _replies(asked: TurnInput) -> list[tuple[int, object]]:
    return [(k, comparable(message)) for k, message in enumerate(asked.messages) if message["role"] == "assistant"]


def comparable(message: Mapping[str, Any]) -> object:
    """Return a key that is equal for two messages with the same text and the same tool calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    words = (message.get("content") or "").replace(CUT, "").strip()
    return words, tuple((call["name"], _canonical(call.get("arguments"))) for call in calls)


def _canonical(arguments: Any) -> str:
    value = parse_arguments(arguments)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _are_deep(calls: Sequence[Mapping[str, Any]]) -> bool:
    try:
        for call in calls:
            parse_arguments(call["function"]["arguments"])
    except TooDeep:
        return True
    return False


def _contain(step: Callable[..., Any], *arguments: Any) -> Any:
    """Run a step for one request. An exception becomes the error text of that request only."""
    try:
        return step(*arguments)
    except Exception as error:
        return f"the request cannot be read ({type(error).__name__}: {printable(str(error))[:200]})"


@dataclass(frozen=True, slots=True)
class Channels:
    """A turn in channels, as gpt-oss writes it (OpenAI's harmony format): thoughts, tool calls, and text for the user.

    ``words`` are the arguments of the tool ``called``, or text for the user.

    Templates of such models accept a turn as ``thinking``, ``tool_calls`` and ``content``. They reject its raw text, and write the
    parts in their own order. A template therefore gets marks instead of the sampled parts. If it writes all marks of a turn and the
    sampled end token, its text reproduces the turn. If it leaves out the thoughts, its text does not.
    """

    thoughts: str
    words: str
    called: str | None = None

    @classmethod
    def read(cls, said: str) -> Channels:
        """Parse the text of a turn, without its last token. A truncated turn may have no words."""
        thoughts, words, called = "", "", None
        for part in said.split(_START):
            header, _, body = part.partition(_MESSAGE)
            body = _ENDS.sub("", body)
            to = _TO.search(header)
            if to is not None:
                words, called = body, to[1]
            elif header.partition(CHANNEL)[2].strip() == "analysis":
                thoughts += body
            else:
                words, called = body, None
        return cls(thoughts, words, called)

    def message(self) -> dict[str, Any]:
        """Return the turn as a message for a client."""
        if self.called is None:
            return {"role": "assistant", "content": self.words, "tool_calls": []}
        function = {"name": self.called, "arguments": self.words}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "", "type": "function", "function": function}],
        }

    def to_message(self, mark: str) -> dict[str, Any]:
        """Return the turn as a message for a template, with marks that begin with ``mark`` instead of its parts."""
        told: dict[str, Any] = {"role": "assistant", "content": f"{mark}words;" if self.called is None else ""}
        if self.thoughts:
            told["thinking"] = f"{mark}thoughts;"
        if self.called is not None:
            function = {"name": self.called, "arguments": f"{mark}words;"}
            told["tool_calls"] = [{"id": "", "type": "function", "function": function}]
        return told

    def end_in(self, text: str, place: int, mark: str, end: str) -> int | None:
        """Return the position in a rendered ``text`` at which this turn ends if it starts at ``place``.

        Returns None if the text lacks a part of the turn.
        """
        words = text.find(f"{mark}words;", place)
        if words < 0 or (self.thoughts and not place <= text.find(f"{mark}thoughts;", place) < words):
            return None
        found = _ENDS.search(text, words)
        return found.start() if found is not None and found[0] == end else None

    def replace_marks(self, text: str, mark: str) -> str:
        """Replace the marks in a text by the sampled parts."""
        for name, said in (("words", self.words), ("thoughts", self.thoughts)):
            own = f"{mark}{name};"
            text = text.replace(f'"{own}"', said).replace(own, said)  # a template quotes the mark of arguments as JSON
        return text


def unmark(text: str, turns: Mapping[str, Channels]) -> str:
    """Replace all marks in a text by the sampled parts. ``turns`` maps marks to turns."""
    for mark, turn in turns.items():
        text = turn.replace_marks(text, mark)
    return text
