"""Token trees: for any edits of an agent's history, every sampled token is learned from once, with its sampled values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories, token_versions
from rlhf_mcore.environments.agents import conversation
from rlhf_mcore.environments.agents.conversation import Continuation, Conversation, comparable
from rlhf_mcore.environments.agents.dialects import TurnInput
from rlhf_mcore.environments.agents.tree import TokenTree
from rlhf_mcore.types import Completion, Prompt, Ragged, Score, Trajectory

PROMPT = Prompt("p", 0, [1], "p")
WORDS = ["a", "b", "ab", " ab ", "<think>x</think>a", "<unk>", ""]


class Engine:
    """Samples given texts, and records each token with a unique logprob and its version."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.drawn = tokenizer, list[tuple[int, float, int]]()

    def draw(self, said: str, reason: str, version: int) -> Completion:
        ids = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id] if reason == "stop" else ids or [5]
        logprobs = [-(len(self.drawn) + k + 1) / 1024 for k in range(len(ids))]
        # The second half of a turn is of newer weights, as under partial rollouts.
        versions = ((0, version),) if len(ids) < 2 else ((0, version), (len(ids) // 2, version + 1))
        own = [version if k < len(ids) // 2 or len(ids) < 2 else version + 1 for k in range(len(ids))]
        self.drawn += list(zip(ids, logprobs, own, strict=True))
        support = Ragged(np.ones(len(ids), np.int32), np.array(ids, np.int32))
        fields = {"route": np.array([[-1000 * x] for x in logprobs], np.float32)}
        return Completion(
            0, np.array(ids, np.int32), np.array(logprobs, np.float32), versions, reason, support=support, fields=fields
        )


class Agent:
    """An episode: messages go in as a client sends them, turns of an engine come out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tree, self.talk = Engine(tokenizer), TokenTree(), Conversation(tokenizer)

    def place(self, messages: list[dict[str, Any]]) -> Continuation:
        [place] = self.talk.find([(self.tree, TurnInput(messages))])
        assert isinstance(place, Continuation), place
        return place

    def answer(self, place: Continuation, said: str, reason: str = "stop", version: int = 0) -> dict[str, Any]:
        turn = self.engine.draw(said, reason, version)
        text, end, message = self.talk.read(turn, ())
        self.tree.add(
            place.parent,
            place.text,
            place.context,
            turn,
            text,
            end,
            reply=comparable(message),
            num_messages=place.num_messages,
        )
        return {"role": "assistant", "content": message["content"]}

    def ask(self, messages: list[dict[str, Any]], said: str, **how: Any) -> dict[str, Any]:
        return self.answer(self.place(messages), said, **how)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def learned_tokens(trajectory: Trajectory) -> list[tuple[int, float, int]]:
    versions = token_versions([trajectory]).tolist()
    rows = zip(trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), versions, strict=True)
    return [row for row, is_learned in zip(rows, trajectory.loss_mask, strict=True) if is_learned]


def texts_of(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    parts = (
        np.split(trajectory.token_ids, np.cumsum(trajectory.sequences)[:-1])
        if trajectory.sequences
        else [trajectory.token_ids]
    )
    return [tokenizer.decode(part) for part in parts]


@pytest.fixture
def agent(tokenizer: PreTrainedTokenizerBase) -> Agent:
    return Agent(tokenizer)


def test_a_history_that_is_told_as_it_was_is_one_sequence(agent: Agent, tokenizer: PreTrainedTokenizerBase) -> None:
    history = [user("q")]
    history += [agent.ask(history, "a"), user("r")]
    history += [agent.ask(history, " b "), user("s")]
    agent.ask(history, "c", reason="length")
    whole = agent.tree.trajectory(PROMPT, 0)
    assert whole.sequences == ()
    expected = "<user>q<end>\n<assistant>a<end>\n<user>r<end>\n<assistant> b <end>\n<user>s<end>\n<assistant>c"
    assert tokenizer.decode(whole.token_ids) == expected
    assert learned_tokens(whole) == agent.engine.drawn
    assert [(turn.writer, turn.text) for turn in whole.turns] == [
        ("prompt", ""),
        ("policy", "a"),
        ("environment", "<end>\n<user>r<end>\n<assistant>"),
        ("policy", " b "),
        ("environment", "<end>\n<user>s<end>\n<assistant>"),
        ("policy", "c"),
    ]


def test_a_history_that_is_rewritten_branches_where_it_begins_to_differ(
    agent: Agent, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = [user("q"), agent.ask([user("q")], "a")]
    second = [*first, user("r")]
    agent.ask(second, "b")
    agent.ask(second, "b")  # a second try
    agent.ask([*first, user("other")], "c")
    agent.ask([user("summary")], "d")
    whole = agent.tree.trajectory(PROMPT, 0)
    begun = "<user>q<end>\n<assistant>a<end>\n"
    assert texts_of(whole, tokenizer) == [
        begun + "<user>r<end>\n<assistant>b<end>",
        begun + "<user>r<end>\n<assistant>b<end>",
        begun + "<user>other<end>\n<assistant>c<end>",
        "<user>summary<end>\n<assistant>d<end>",
    ]
    assert sorted(learned_tokens(whole)) == sorted(agent.engine.drawn)
    assert Counter(turn.writer for turn in whole.turns)["policy"] == 5
    assert [len(learned_tokens(agent.tree.trajectory(PROMPT, 0, which))) for which in ("last", "longest")] == [2, 4]
    assert texts_of(agent.tree.trajectory(PROMPT, 0, "last"), tokenizer) == ["<user>summary<end>\n<assistant>d<end>"]


def test_the_names_of_control_tokens_in_what_others_write_are_text(
    agent: Agent, tokenizer: PreTrainedTokenizerBase
) -> None:
    place = agent.place([user("<end>\n<assistant>yes<end>")])
    assert place.context.count(tokenizer.eos_token_id) == 1
    assert [tokenizer.decode([token]) for token in place.context[:6]] == ["<user>", "<", "e", "n", "d", ">"]


def test_texts_and_tokens_without_messages_continue_too(agent: Agent, tokenizer: PreTrainedTokenizerBase) -> None:
    def place(prompt: Any) -> Continuation:
        [found] = agent.talk.find([(agent.tree, TurnInput(prompt=prompt))])
        assert isinstance(found, Continuation)
        return found

    agent.answer(place("once"), " upon", "length")
    more = place("once upon a")
    assert more.parent is agent.tree.nodes[0] and more.text == " a"
    agent.answer(more, " time")
    tokens = agent.tree.nodes[1].tokens()
    assert place([*tokens, 7]).context == [7] and place([*tokens, 7]).parent is agent.tree.nodes[1]
    assert place("once upon a time").parent is agent.tree.nodes[0]  # the end that was sampled is not there
    assert place("twice").parent is None and place(tokens[:3]).parent is None


def test_what_a_template_does_to_spaces_is_no_branch(tokenizer: PreTrainedTokenizerBase) -> None:
    """Qwen3's template changes spaces within a thought, and Llama's around a turn. The sampled tokens are continued unchanged."""
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim | replace('</think>', '\n</think>\n\n') + '<end>' }}\n"
        "{% endfor %}<assistant>"
    )
    try:
        agent = Agent(tokenizer)
        history = [user("q"), agent.ask([user("q")], " <think> x</think>a "), user("r")]
        agent.ask(history, "b")
        whole = agent.tree.trajectory(PROMPT, 0)
        expected = "<user>q<end>\n<assistant> <think> x</think>a <end>\n<user>r<end>\n<assistant>b<end>"
        assert whole.sequences == () and tokenizer.decode(whole.token_ids) == expected
        assert learned_tokens(whole) == agent.engine.drawn
    finally:
        tokenizer.chat_template = before


def test_what_a_template_takes_out_is_a_branch(tokenizer: PreTrainedTokenizerBase) -> None:
    own = Conversation(tokenizer).tokenizer
    before = own.chat_template
    own.chat_template = (
        "{% for m in messages %}{% set c = m.content.split('</think>')[-1] if not loop.last else m.content %}"
        "{{ '<' + m.role + '>' + c + '<end>' }}\n{% endfor %}<assistant>"
    )
    try:
        agent = Agent(tokenizer)
        said = agent.ask([user("q")], "<think>x</think>a")
        assert agent.place([user("q"), said, user("r")]).parent is None
        agent.ask([user("q"), said, user("r")], "b")
        whole = agent.tree.trajectory(PROMPT, 0)
        assert texts_of(whole, tokenizer) == [
            "<user>q<end>\n<assistant><think>x</think>a<end>",
            "<user>q<end>\n<assistant>a<end>\n<user>r<end>\n<assistant>b<end>",
        ]
        assert learned_tokens(whole) == agent.engine.drawn
    finally:
        own.chat_template = before


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_an_agent_does_each_drawn_token_is_learned_once(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    """Any interleaving of requests, edits, tries and forks of several conversations, with answers that come in any order."""
    with patch.object(conversation, "in_child", render_here):  # a fork for each request takes ten times as long
        play(Agent(tokenizer), data)


def render_here(apply: Callable[[Any], str], inputs: Sequence[Any]) -> Iterator[dict[str, str]]:
    return ({"text": apply(item)} for item in inputs)


def play(agent: Agent, data: st.DataObject) -> None:
    histories: list[list[dict[str, Any]]] = [[user("q")]]
    waiting: list[tuple[list[dict[str, Any]], Continuation]] = []
    for step in range(data.draw(st.integers(1, 10))):
        history = histories[data.draw(st.integers(0, len(histories) - 1))]
        move = data.draw(st.sampled_from(["ask", "ask", "answer", "edit", "drop", "fork", "system"]))
        if move == "ask":
            waiting.append((history, agent.place(list(history))))
        elif move == "edit" and history:
            place = data.draw(st.integers(0, len(history) - 1))
            histories.append([*history[:place], {**history[place], "content": data.draw(st.sampled_from(WORDS))}])
        elif move == "drop" and len(history) > 1:
            histories.append(history[data.draw(st.integers(1, len(history) - 1)) :])
        elif move == "fork":
            histories.append([*history, user(data.draw(st.sampled_from(WORDS)))])
        elif move == "system":
            histories.append([{"role": "system", "content": "<end>s"}, *history])
        if waiting and (move == "answer" or data.draw(st.booleans())):
            asked, where = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            reason = data.draw(st.sampled_from(["stop", "length"]))
            reply = agent.answer(where, data.draw(st.sampled_from(WORDS)), reason, version=step)
            histories.append([*asked, reply, user("next")])
    for _, where in waiting:
        agent.answer(where, "late")
    if not agent.tree.nodes:
        return
    whole = agent.tree.trajectory(PROMPT, 0)
    assert sorted(learned_tokens(whole)) == sorted(agent.engine.drawn)
    sampled = whole.loss_mask
    assert whole.support is not None
    assert whole.support.counts.tolist() == sampled.astype(int).tolist()
    assert whole.support.values.tolist() == whole.token_ids[sampled].tolist()
    np.testing.assert_allclose(whole.fields["route"][sampled, 0], -1000 * whole.logprobs[sampled], rtol=1e-6)
    # Each branch equals an engine's request and its sampled tokens.
    parts = np.split(whole.token_ids, np.cumsum(whole.sequences)[:-1]) if whole.sequences else [whole.token_ids]
    assert [part.tolist() for part in parts] == [leaf.tokens() for leaf in agent.tree.leaves()]
    for which in ("last", "longest"):
        chosen = agent.tree.trajectory(PROMPT, 0, which)
        assert not chosen.sequences and Counter(learned_tokens(chosen)) <= Counter(agent.engine.drawn)
    whole.score, whole.record = Score(1.0), {"seconds": 0.5, "nodes": [{"said": "a", "parent": None}]}
    [[read]] = decode_trajectories(encode_trajectories({3: [whole]}), {3: PROMPT}).values()
    assert read.sequences == whole.sequences and read.turns == whole.turns
    assert learned_tokens(read) == learned_tokens(whole)
    assert read.record == whole.record
