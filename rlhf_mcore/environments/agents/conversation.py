"""From the messages of a request to tokens: those that were sampled as they were, the rest by the model's chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_mcore.data.rendering import in_child
from rlhf_mcore.environments.agents.channels import CHANNEL, Channels, unmark
from rlhf_mcore.environments.agents.tree import Node, TokenTree, after
from rlhf_mcore.environments.control_tokens import CUT, ControlTokens, UnreadableText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.types import Completion, Prompt

_THOUGHT = "<think>"  # some templates ask for an answer behind it
# Text of a turn with special tokens, schemas of the request's tools -> message.
Parse = Callable[[str, Sequence[Mapping[str, Any]]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """Hold what a request continues: messages as a chat template takes them, or a text or tokens as they are."""

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Hold the place of a request's answer in a tree: behind ``parent``, after the tokens of ``context``, which ``text`` tells.

    ``text`` is as a template has written it, marks included; ``shown`` is for people.
    """

    parent: Node | None
    text: str
    context: list[int]
    num_messages: int = 0
    shown: str | None = None

    def tokens(self) -> list[int]:
        """Return all tokens before the answer."""
        return [*(self.parent.tokens() if self.parent is not None else ()), *self.context]


@dataclass(slots=True)
class Conversation:
    """The chat template and the tokenizer of a model, for the endpoint of agents.

    ``mode`` is ``data.apply_chat_template``: with "false", or without a template, messages are plain texts one after the other.
    ``parse`` finds calls of tools in a turn; None: a turn is all text.
    """

    tokenizer: PreTrainedTokenizerBase
    mode: str = "auto"
    parse: Parse | None = None
    control: ControlTokens = field(init=False)
    _mark: str = field(init=False, default_factory=lambda: f"said-{secrets.token_hex(8)}-")  # nobody else writes it

    _has_channels: bool = field(init=False)

    def __post_init__(self) -> None:
        self._has_channels = CHANNEL in self.tokenizer.get_vocab()
        self.control = ControlTokens(self.tokenizer)

    @property
    def _is_plain(self) -> bool:
        return self.mode == "false" or self.tokenizer.chat_template is None

    def messages_of(self, prompt: Prompt) -> list[dict[str, Any]] | None:
        """Return a prompt as messages, a text as one of the user; None where it came with the template applied."""
        if prompt.messages is not None:
            return prompt.messages
        question = prompt.text if self._is_plain else prompt.question
        return None if question is None else [{"role": "user", "content": question}]

    def find(self, requests: Sequence[tuple[TokenTree, Asked]]) -> list[Place | str]:
        """Find the place of each request in its tree, or tell what is wrong with it. One call of the template's process for all."""
        followed = [tree.follow(_replies(asked)) for tree, asked in requests]
        chats = [k for k, (_, asked) in enumerate(requests) if asked.prompt is None]
        items = [self._told(requests[k][1], followed[k]) for k in chats]
        rendered = iter(in_child(_plain_text if self._is_plain else self._apply, items) if items else ())
        places: list[Place | str] = []
        broken = ""
        for (tree, asked), nodes in zip(requests, followed, strict=True):
            if asked.prompt is not None:
                places.append(self._continued(tree, asked.prompt))
                continue
            answer = next(rendered, None) or {"error": broken}
            broken = answer.get("error", "")
            if broken:
                places.append(f"the chat template refuses these messages: {broken}")
                continue
            node, start = tree.shared(answer["text"], nodes, self._end_of)
            channels = {self._mark_of(each): Channels.read(each.said) for each in nodes if CHANNEL in each.said}
            places.append(self._place(node, answer["text"][start:], len(asked.messages), channels))
        return places

    def _mark_of(self, node: Node) -> str:
        return f"{self._mark}{node.place}-"

    def _end_of(self, node: Node, text: str, place: int) -> int | None:
        """Return where a text ends to tell a turn that begins at ``place``; None where it does not tell it."""
        if CHANNEL not in node.said:
            return after(text, place, node.said)
        return Channels.read(node.said).end_in(text, place, self._mark_of(node), node.end)

    def _continued(self, tree: TokenTree, prompt: str | Sequence[int]) -> Place | str:
        if not isinstance(prompt, str):
            node, start = tree.shared_tokens(prompt)
            context = list(prompt[start:])
            return Place(node, str(self.tokenizer.decode(context, skip_special_tokens=False)), context)
        node, start = tree.shared_text(prompt)
        try:
            return Place(node, prompt[start:], self.control.encode_cut(prompt[start:]))
        except UnreadableText as error:
            return str(error)

    def _place(self, node: Node | None, text: str, num_messages: int, channels: Mapping[str, Channels]) -> Place | str:
        told = unmark(text, channels)
        try:
            context = self.control.encode_cut(told)
        except UnreadableText as error:
            return str(error)
        if node is not None and node.end and context[:1] == [int(node.turn.token_ids[-1])]:
            context = context[1:]  # it was sampled
        return Place(node, text, context, num_messages, told.replace(CUT, ""))

    def _told(self, asked: Asked, nodes: Sequence[Node]) -> dict[str, Any]:
        """Write into the messages what was sampled, where they tell it, and mark names of control tokens in what others wrote."""
        said = {node.num_messages: node for node in nodes}
        messages = []
        for number, message in enumerate(asked.messages):
            if number in said:
                node = said[number]
                if CHANNEL in node.said:
                    messages.append(Channels.read(node.said).marked(self._mark_of(node)))
                    continue
                thought = node.text[node.text.rindex(_THOUGHT) :] if node.text.rstrip().endswith(_THOUGHT) else ""
                messages.append({"role": "assistant", "content": thought + node.said})
            elif message["role"] in ("assistant", "system"):
                messages.append(dict(message))
            else:
                messages.append({**message, "content": self.control.cut(message["content"])})
        return {"messages": messages, "tools": list(asked.tools)}

    def _apply(self, item: Mapping[str, Any]) -> str:
        template = self.tokenizer.apply_chat_template
        tools = item["tools"] or None
        return str(template(item["messages"], tools=tools, tokenize=False, add_generation_prompt=True))

    def words_of(self, ids: Sequence[int], asked: Asked, stops: Sequence[str]) -> str:
        """Return the words of a turn that is being drawn, as far as they will stay: "" where calls of tools may be among them."""
        if (self.parse is not None and asked.tools) or self._has_channels:
            return ""
        words = str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).rstrip("\ufffd")
        if found := [words.index(stop) for stop in stops if stop in words]:
            return words[: min(found)]
        return words[: len(words) - max((len(stop) - 1 for stop in stops), default=0)] if stops else words

    def read(self, turn: Completion, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str, dict[str, Any]]:
        """Return a turn's text with special tokens, the text of its end token ("" without one), and the message that it is."""
        ids = turn.token_ids.tolist()
        ends = turn.finish_reason == "stop"
        said = str(self.tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=False))
        end = str(self.tokenizer.decode(ids[-1:], skip_special_tokens=False)) if ends else ""
        if CHANNEL in said:
            return said, end, Channels.read(said).message()
        if self.parse is not None and tools:
            return said, end, self.parse(said, tools)
        content = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return said, end, {"role": "assistant", "content": content, "tool_calls": []}


def _plain_text(item: Mapping[str, Any]) -> str:
    return "".join(message["content"] or "" for message in item["messages"])


def _replies(asked: Asked) -> list[tuple[int, object]]:
    return [(k, comparable(message)) for k, message in enumerate(asked.messages) if message["role"] == "assistant"]


def comparable(message: Mapping[str, Any]) -> object:
    """Return what two messages of the policy have in common if they are the same: their words, and calls with their arguments."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    words = (message.get("content") or "").replace(CUT, "").strip()
    return words, tuple((call["name"], _canonical(call.get("arguments"))) for call in calls)


def _canonical(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, sort_keys=True)
