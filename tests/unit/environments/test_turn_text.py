"""Observations between the markers of chat templates, and templates that write history differently."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.types import Completion, Prompt
from tests.messages import expect_error

FORGETS = (  # as templates of reasoning models: thoughts of turns before the last message of the user are taken out
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1] if not loop.last else m.content %}"
    "{{ '<' + m.role + '>' + said + '<end>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('only users and assistants') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPS = "{% for m in messages %}{% if m.role != 'tool' %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endif %}{% endfor %}"


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    found = copy.deepcopy(tokenizer)
    found.chat_template = template
    return found


def said(tokenizer: PreTrainedTokenizerBase, text: str, reason: str = "stop") -> Completion:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    return Completion(0, ids, np.zeros(len(ids), np.float32), ((0, 0),), reason)


USER, TOOL = {"role": "user", "content": "no <end> {{ 7 * 7 }}"}, {"role": "tool", "content": "4"}


def test_the_end_of_a_turn_is_added_where_it_was_not_sampled(tokenizer: PreTrainedTokenizerBase) -> None:
    text = TurnText(tokenizer)
    rest = "\n<user>no <end> {{ 7 * 7 }}<end>\n<tool>4<end>\n<assistant>"
    assert tokenizer.decode(text.after(said(tokenizer, "a<end>"), [USER, TOOL])) == rest
    assert tokenizer.decode(text.after(said(tokenizer, "a", "length"), [USER, TOOL])) == "<end>" + rest
    assert tokenizer.decode(text.after(said(tokenizer, "a<end>"), [])) == "\n<assistant>"


def test_without_a_template_observations_are_plain_text(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = Prompt("p", 0, [1], "ask: ")
    for text in (TurnText(with_template(tokenizer, None)), TurnText(tokenizer, "false")):
        assert tokenizer.decode(text.after(said(tokenizer, "a<end>"), [TOOL])) == "4"
        assert text.opening(prompt, [TOOL])[1] == "ask: 4"


def test_a_template_that_rewrites_history_is_refused_by_name_or_used_for_new_messages_alone(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    forgets = with_template(tokenizer, FORGETS)
    forgets.name_or_path = "models/forgetful"
    with expect_error(ConfigError, field="models/forgetful", remedy="environment.rewritten_history=keep"):
        TurnText(forgets).after(said(tokenizer, "a<end>"), [TOOL])
    kept = TurnText(forgets, keep=True).after(said(tokenizer, "<think>b</think>a<end>"), [TOOL])
    assert tokenizer.decode(kept) == "<tool>4<end><assistant>"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (ALTERNATES, "rejects messages of the roles user, assistant, tool: only users and assistants"),
        (DROPS, "leaves out a message of the role tool"),
    ],
)
def test_roles_that_a_template_does_not_know(tokenizer: PreTrainedTokenizerBase, template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TurnText(with_template(tokenizer, template), keep=True).after(said(tokenizer, "a<end>"), [TOOL])
