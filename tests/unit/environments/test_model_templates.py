"""Token trees under the rules of published templates: thoughts that these drop are branches, all else continues what was sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.environments.agents.conversation import Continuation, Conversation, comparable
from rlhf_mcore.environments.agents.dialects import TurnInput
from rlhf_mcore.environments.agents.tree import TokenTree
from rlhf_mcore.types import Prompt
from tests.unit.environments.model_templates import FAMILIES, Family, completion, parse, wide

THINKING = [name for name in FAMILIES if name != "deepseek-v3"]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


class Talk:
    """An episode with a model of a family. Messages are repeated as an unchanged client of OpenAI's API repeats them."""

    def __init__(self, family: Family) -> None:
        self.family, self.tokenizer = family, family.tokenizer()
        self.tree, self.talk = TokenTree(), Conversation(self.tokenizer, parse=parse)
        self.history: list[dict[str, Any]] = []
        self.drawn: list[int] = []

    def ask(self, text: str, said: str, role: str = "user") -> Continuation:
        """Ask with a new message, and sample ``said``."""
        self.history.append({"role": role, "content": text})
        [place] = self.talk.find([(self.tree, TurnInput(self.history, TOOLS))])
        assert isinstance(place, Continuation), place
        turn = completion(self.tokenizer, said, len(self.drawn))
        self.drawn += turn.token_ids.tolist()
        text, end, message = self.talk.read(turn, TOOLS)
        more = {"reply": comparable(message), "num_messages": place.num_messages, "shown": place.shown}
        self.tree.add(place.parent, place.text, place.context, turn, text, end, **more)
        self.history.append(message)
        return place

    def sequences(self) -> list[str]:
        """The texts of the branches that are learned from. Each sampled token is in them once."""
        whole = self.tree.trajectory(Prompt("p", 0, [1], "p"), 0)
        order = np.argsort(-whole.logprobs[whole.loss_mask])
        assert whole.token_ids[whole.loss_mask][order].tolist() == self.drawn
        ends = np.cumsum(whole.sequences) if whole.sequences else [len(whole.token_ids)]
        return [self.tokenizer.decode(part) for part in np.split(whole.token_ids, ends[:-1])]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_that_the_template_drops_begins_a_branch(name: str) -> None:
    family = FAMILIES[name]
    talk = Talk(family)
    first, second = family.answers("deep", "one"), family.answers("deeper", "two")
    talk.ask("q", first)
    place = talk.ask("r", second)
    opening = render(talk.tokenizer, [question("q")])
    again = render(talk.tokenizer, [question("q"), {"role": "assistant", "content": "one"}, question("r")])
    assert place.parent is None and "deep" not in again
    assert talk.sequences() == [opening + wide(first), again + wide(second)]


def test_without_thoughts_a_conversation_is_one_sequence() -> None:
    talk = Talk(FAMILIES["deepseek-v3"])
    talk.ask("q", "one<!end_of_sentence!>")
    talk.ask("r", talk.family.calls("", 3))
    talk.ask("4", "two<!end_of_sentence!>", role="tool")
    [whole] = talk.sequences()
    begun = "<!begin_of_sentence!><!User!>q<!Assistant!></think>one<!end_of_sentence!><!User!>r<!Assistant!></think>"
    called = '<!tool_calls_begin!><!tool_call_begin!>add<!tool_sep!>{"a":  3}<!tool_call_end!><!tool_calls_end!><!end_of_sentence!>'
    assert whole == wide(f"{begun}{called}<!tool_output_begin!>4<!tool_output_end!>two<!end_of_sentence!>")


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].keeps_with_tools])
def test_while_tools_are_called_tokens_go_on_as_they_were_sampled(name: str) -> None:
    family = FAMILIES[name]
    talk = Talk(family)
    calls = [wide(family.calls(thought, a)) for thought, a in (("first", 3), ("second", 4))]
    answer = wide(family.answers("last", "done"))
    talk.ask("q", calls[0])
    places = [talk.ask("3", calls[1], role="tool"), talk.ask("4", answer, role="tool")]
    assert [place.parent for place in places] == talk.tree.nodes[:2]
    [whole] = talk.sequences()
    after = [talk.tokenizer.decode(place.context) for place in places]
    assert whole == render(talk.tokenizer, [question("q")]) + calls[0] + after[0] + calls[1] + after[1] + answer
    assert all(result in text for result, text in zip("34", after, strict=True))
    # The template's text between turns is unchanged, and does not repeat a sampled end.
    assert not any(text.startswith((calls[0][-8:], calls[1][-8:])) for text in after)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_a_branch_goes_on_where_tools_are_called_after_a_second_question(name: str) -> None:
    family = FAMILIES[name]
    talk = Talk(family)
    talk.ask("q", family.answers("deep", "one"))
    branch = talk.ask("r", family.calls("deeper", 3))
    then = talk.ask("3", family.answers("deepest", "two"), role="tool")
    assert branch.parent is None
    assert (then.parent is talk.tree.nodes[1]) == family.keeps_with_tools
    assert len(talk.sequences()) == (2 if family.keeps_with_tools else 3)
    assert "one" in talk.tree.nodes[1].shown  # and none of our marks


def test_what_a_client_gets_of_channels() -> None:
    talk = Talk(FAMILIES["gpt-oss"])
    talk.ask("q", talk.family.calls("hidden", 3))
    talk.ask("3", talk.family.answers("hidden", "done"), role="tool")
    call, answer = talk.history[1], talk.history[3]
    assert call["content"] == "" and call["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":  3}'}
    assert (answer["content"], answer["tool_calls"]) == ("done", [])
    cut = completion(talk.tokenizer, "<|channel|>analysis<|message|>too lo<|end|>", 0)
    assert talk.talk.read(cut, ())[2]["content"] == ""
