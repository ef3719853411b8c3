"""Hold what the policy has said in an episode of an agent as a tree: each token is learned from once, whatever the history.

A node is one turn of the policy: the tokens that led to it from its parent's end, and those that were sampled. A request whose text
begins with all that was said on the way to a node continues the node's tokens, as they were sampled. One that tells the history
differently (thoughts left out, a summary, another agent, a second try) begins a branch at the deepest node that it shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.data.episodes import episode, join_recorded
from rlhf_mcore.types import Completion, Prompt, Ragged, Recorded, Trajectory, Turn


@dataclass(slots=True, eq=False)
class Node:
    """A turn of the policy. ``place`` counts the nodes of a tree; ``end`` is the text of a sampled end token, "" if there is none.

    ``reply`` is the message that the agent got, in a form that can be compared, after ``num_messages`` others.
    """

    place: int
    parent: Node | None
    text: str  # between the parent's end and this turn, as it was rendered
    context: NDArray[np.int32]  # the tokens of it
    turn: Completion
    said: str  # the text of what was sampled, without the end
    end: str = ""
    reply: object = None
    num_messages: int = 0
    shown: str = ""  # ``text`` for people
    images: tuple[str, ...] = ()  # the digests of those in ``context``
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """Return the nodes from the root's child to this one."""
        nodes, node = [self], self
        while node.parent is not None:
            node = node.parent
            nodes.append(node)
        return nodes[::-1]

    def tokens(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        return [int(token) for node in self.path() for part in (node.context, node.turn.token_ids) for token in part]

    def seen(self) -> tuple[str, ...]:
        """Return the digests of all images up to this turn."""
        return tuple(digest for node in self.path() for digest in node.images)


class TokenTree:
    """The turns of one episode."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Node] = []
        self._by_messages: dict[int, list[Node]] = {}

    def children_of(self, node: Node | None) -> list[Node]:
        """Return the turns that continue a node; None: those that begin with the first token."""
        return self.roots if node is None else node.children

    def add(
        self,
        parent: Node | None,
        text: str,
        context: Sequence[int],
        turn: Completion,
        said: str,
        end: str = "",
        *,
        reply: object = None,
        num_messages: int = 0,
        shown: str | None = None,
        images: tuple[str, ...] = (),
    ) -> Node:
        """Add a turn that was sampled after ``context``, which continues ``parent``."""
        tokens = np.array(context, np.int32)
        node = Node(len(self.nodes), parent, text, tokens, turn, said, end, reply, num_messages)
        node.shown, node.images = text if shown is None else shown, images
        self.nodes.append(node)
        self.children_of(parent).append(node)
        self._by_messages.setdefault(num_messages, []).append(node)
        return node

    def follow(self, replies: Sequence[tuple[int, object]]) -> list[Node]:
        """Return the turns that messages of a request are: (place among the messages, message in the form of ``Node.reply``).

        A message that was no turn is part of the text around the others. Of turns with the same words the one that continues the turn
        before is taken, else the latest: a template that leaves out thoughts has begun a branch in between.
        """
        nodes: list[Node] = []
        for place, reply in replies:
            before = nodes[-1] if nodes else None
            same = [node for node in self._by_messages.get(place, ()) if node.reply == reply]
            if same:
                nodes.append(max(same, key=lambda node: (node.parent is before, node.place)))
        return nodes

    def shared(
        self, text: str, nodes: Iterable[Node], end_of: Callable[[Node, str, int], int | None]
    ) -> tuple[Node | None, int]:
        """Return the deepest of ``nodes`` up to which ``text`` tells all that was said on the way to it, and where it ends.

        A template may write the spaces of a turn differently, and may write its end or not. ``end_of`` finds where a text ends to tell
        a turn that begins at a place, or None.
        """
        below: dict[Node | None, list[Node]] = {}
        for node in nodes:
            below.setdefault(node.parent, []).append(node)
        best: tuple[Node | None, int] = (None, 0)
        waiting = [best]
        while waiting:
            last, place = waiting.pop()
            best = max(best, (last, place), key=lambda each: each[1])
            for node in below.get(last, ()):
                if text.startswith(node.text, place):
                    stop = end_of(node, text, place + len(node.text))
                    waiting += [(node, stop)] if stop is not None else []
        return best

    def shared_text(self, text: str) -> tuple[Node | None, int]:
        """Return the deepest node that a text without messages continues, and where it ends: every letter and sampled end is there."""
        best: tuple[Node | None, int] = (None, 0)
        waiting: list[tuple[Node, int]] = [(node, 0) for node in self.roots]
        while waiting:
            node, place = waiting.pop()
            whole = node.text + node.said + node.end
            if text.startswith(whole, place):
                stop = place + len(whole)
                best = max(best, (node, stop), key=lambda each: (each[1], each[0].place if each[0] else -1))
                waiting += [(child, stop) for child in node.children]
        return best

    def shared_tokens(self, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Return the deepest node that tokens continue, and how many are its."""
        best: tuple[Node | None, int] = (None, 0)
        for node in self.nodes:
            own = node.tokens()
            if len(own) >= best[1] and list(tokens[: len(own)]) == own:
                best = node, len(own)
        return best

    # -------------------------------------------------------------------------------------------------- what is learned
    def leaves(self, branches: str = "all") -> list[Node]:
        """Return the ends of the branches that are learned from, in the order in which they were sampled.

        ``last``: the branch of the last turn; ``longest``: the one with most sampled tokens, the later of two.
        """
        ends = [node for node in self.nodes if not node.children]
        if branches == "last":
            return ends[-1:]
        if branches == "longest":
            sampled = [sum(len(node.turn.token_ids) for node in end.path()) for end in ends]
            return [max(zip(sampled, ends, strict=True), key=lambda each: (each[0], each[1].place))[1]]
        return ends

    def trajectory(self, prompt: Prompt, sample: int, branches: str = "all") -> Trajectory:
        """Return the episode: a sequence for each branch. Of tokens that branches share, those of the first one are learned from."""
        assert self.nodes, "an episode needs a turn of the policy"
        learned: set[int] = set()
        parts = [self._sequence(prompt, sample, leaf, learned) for leaf in self.leaves(branches)]
        return parts[0] if len(parts) == 1 else join_sequences(parts)

    def _sequence(self, prompt: Prompt, sample: int, leaf: Node, learned: set[int]) -> Trajectory:
        nodes = leaf.path()
        first = replace(prompt, prompt_ids=nodes[0].context.tolist(), text=nodes[0].shown, images=leaf.seen())
        written: list[Completion | NDArray[np.int32]] = []
        texts, repeated = [""], 1  # the prompt, and what an earlier branch has shown
        for number, node in enumerate(nodes):
            if number and len(node.context):
                written.append(node.context)
                texts.append(node.shown)
            written.append(node.turn.token_ids if node.place in learned else node.turn)
            texts.append(node.said)
            repeated = len(texts) if node.place in learned else repeated
            learned.add(node.place)
        drawn = episode(first, sample, written, leaf.said)
        writers = ["prompt"] * repeated + [turn.writer for turn in drawn.turns[repeated:]]
        turns = [
            replace(turn, text=text, writer=writer)
            for turn, text, writer in zip(drawn.turns, texts, writers, strict=True)
        ]
        return replace(drawn, turns=tuple(turns))


def after(text: str, place: int, said: str) -> int | None:
    """Return where ``said`` ends in a text from ``place`` on; None where something else is there. Templates may change spaces."""
    if text.startswith(said, place):
        return place + len(said)
    letters = [letter for letter in said if not letter.isspace()]
    if not letters:
        return None
    for letter in letters:
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith(letter, place):
            return None
        place += 1
    return place


def join_sequences(parts: Sequence[Trajectory]) -> Trajectory:
    """Join the branches of an episode into one trajectory of several sequences. The last one tells how it ended, and what was said."""
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    turns: list[Turn] = []
    versions: list[tuple[int, int]] = []
    for start, part in zip(starts, parts, strict=False):
        turns += [replace(turn, start=turn.start + start, stop=turn.stop + start) for turn in part.turns]
        versions += [(start + first, version) for first, version in part.versions]
    supports = [part.support for part in parts if part.support is not None]
    support: Recorded | None = join_recorded(supports) if len(supports) == len(parts) else None
    assert support is None or isinstance(support, Ragged)
    seen = tuple(part.prompt.images for part in parts)
    return replace(
        parts[-1],
        prompt=replace(parts[0].prompt, images=tuple(dict.fromkeys(chain(*seen)))),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        turns=tuple(turns),
        versions=tuple(versions),
        num_prefilled=sum(part.num_prefilled for part in parts),
        num_cached=sum(part.num_cached for part in parts),
        support=support,
        fields={name: join_recorded([part.fields[name] for part in parts]) for name in parts[0].fields},
        sequences=tuple(len(part.token_ids) for part in parts),
        sequence_images=seen if any(seen) else (),
    )
