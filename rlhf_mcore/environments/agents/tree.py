"""The turns of an agent's episode as a tree. Each sampled token is trained on once, even if several requests contain it.

A node is one turn of the policy: the tokens between its parent's end and the turn, and the sampled tokens. If the text of a request
begins with the whole text on the path to a node, generation continues from the node's tokens, exactly as they were sampled. If the
history in a request differs (thoughts left out, a summary, another agent, a second try), the request starts a branch at the deepest
node that it shares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.data.episodes import episode, join_recorded
from rlhf_mcore.sampling.episode_log import EpisodeLog, node_texts
from rlhf_mcore.types import Completion, Prompt, Ragged, Recorded, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, eq=False)
class Node:
    """A turn of the policy. ``place`` is its index in the tree; ``end`` is the text of its sampled end token, "" if it has none.

    ``reply`` is the message that the agent received, as a key for comparison (``conversation.comparable``). In a later request it
    is expected at the index ``num_messages``.
    """

    place: int
    parent: Node | None
    text: str  # rendered text between the parent's end and this turn
    context: NDArray[np.int32]  # tokens of text
    turn: Completion
    said: str  # sampled text, without the end token
    end: str = ""
    reply: object = None
    num_messages: int = 0
    shown: str = ""  # text for people
    images: tuple[str, ...] = ()  # digests of the images in context
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """Return the nodes from the first turn to this turn."""
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
        """Return the turns that continue a node; for None, the first turns."""
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
        """Return the turns that the assistant messages of a request repeat.

        ``replies`` are (index among the messages, message in the form of ``Node.reply``). A message that repeats no turn is treated as
        text of the client. If several turns are equal, the turn that continues the previous one is used, else the latest. Such
        duplicates arise when a template leaves out thoughts and so starts a branch.
        """
        nodes: list[Node] = []
        for place, reply in replies:
            before = nodes[-1] if nodes else None
            same = [node for node in self._by_messages.get(place, ()) if node.reply == reply]
            if same:
                nodes.append(max(same, key=lambda node: (node.parent is before, node.place)))
        return nodes

    def find_shared(
        self, text: str, nodes: Iterable[Node], end_of: Callable[[Node, str, int], int | None]
    ) -> tuple[Node | None, int]:
        """Return the deepest of ``nodes`` whose complete path is at the start of ``text``, and the position in ``text`` after it.

        A template may change the spaces of a turn, and may leave out its end. ``end_of`` returns the end of a turn that starts at a
        position of the text; None if the text differs from the turn.
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
        """Return the deepest node that a plain text continues, and the position after it.

        The text must contain every character and every sampled end of the path.
        """
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
        """Return the deepest node that tokens continue, and the number of tokens up to its end."""
        best: tuple[Node | None, int] = (None, 0)
        for node in self.nodes:
            own = node.tokens()
            if len(own) >= best[1] and list(tokens[: len(own)]) == own:
                best = node, len(own)
        return best

    # -------------------------------------------------------------------------------------------------- what is learned
    def leaves(self, branches: str = "all") -> list[Node]:
        """Return the last turns of the branches to train on, in the order of sampling.

        ``last``: the branch of the last turn. ``longest``: the branch with the most sampled tokens, the latest of equal branches.
        """
        ends = [node for node in self.nodes if not node.children]
        if branches == "last":
            return ends[-1:]
        if branches == "longest":
            sampled = [sum(len(node.turn.token_ids) for node in end.path()) for end in ends]
            return [max(zip(sampled, ends, strict=True), key=lambda each: (each[0], each[1].place))[1]]
        return ends

    def trajectory(self, prompt: Prompt, sample: int, branches: str = "all") -> Trajectory:
        """Return the episode, with a sequence for each branch. Tokens that branches share are trained on in the first one only."""
        assert self.nodes, "an episode needs a turn of the policy"
        learned: set[int] = set()
        parts = [self._sequence(prompt, sample, leaf, learned) for leaf in self.leaves(branches)]
        return parts[0] if len(parts) == 1 else join_sequences(parts)

    def _sequence(self, prompt: Prompt, sample: int, leaf: Node, learned: set[int]) -> Trajectory:
        nodes = leaf.path()
        first = replace(prompt, prompt_ids=nodes[0].context.tolist(), text=nodes[0].shown, images=leaf.seen())
        written: list[Completion | NDArray[np.int32]] = []
        texts, repeated = [""], 1  # repeated: the prompt, and the turns that are part of an earlier branch
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
    """Return where ``said`` ends in a text if it starts at ``place``; None if the text differs. Spaces may differ."""
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
    """Join the branches of an episode into one trajectory of several sequences.

    The response text, finish reason and score are the values of the last branch.
    """
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


def cut_at_stop(
    turn: Completion, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Completion, str | None]:
    """Cut a turn after the first token that completes one of the ``stops``. Returns also this stop text, or None."""

    def find(count: int) -> str | None:
        text = str(tokenizer.decode(turn.token_ids[:count].tolist(), skip_special_tokens=True))
        return min((stop for stop in stops if stop in text), key=text.index, default=None)

    count = len(turn.token_ids)
    if find(count) is None:
        return turn, None
    count = bisect_left(range(count), True, lo=1, key=lambda count: find(count) is not None)
    return cut_turn(turn, count), find(count)


def cut_turn(drawn: Completion, count: int) -> Completion:
    """Return the first ``count`` tokens of a turn, with all values recorded for them."""
    dropped = len(drawn.token_ids) - count

    def shorten(values: Recorded) -> Recorded:
        if isinstance(values, Ragged):
            counts = values.counts[:count]
            return Ragged(counts, values.values[: int(np.sum(counts))])
        return values[: len(values) - dropped]  # may also contain values of tokens before the turn

    support = shorten(drawn.support) if drawn.support is not None else None
    assert support is None or isinstance(support, Ragged)
    return replace(
        drawn,
        token_ids=drawn.token_ids[:count],
        logprobs=drawn.logprobs[:count],
        versions=tuple((first, version) for first, version in drawn.versions if first < count),
        finish_reason=drawn.finish_reason if count == len(drawn.token_ids) else "length",
        support=support,
        fields={name: shorten(values) for name, values in drawn.fields.items()},
    )


def tree_record(tree: TokenTree, log: EpisodeLog) -> dict[str, Any]:
    """Return the record of an episode as JSON values: its turns with their parents, texts and times."""
    nodes = [
        {
            "parent": node.parent.place if node.parent is not None else None,
            **node_texts(node.shown, node.said, len(node.context), node.turn),
            **log.node_record(node.place),
        }
        for node in tree.nodes
    ]
    return {**log.summary(), "nodes": nodes}
