"""Give a teacher separate prompts: calls of the user's function, uses of its results, and rejected results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.rendering import PromptContext
from rlhf_mcore.types import Prompt

FILE = """
calls = []

def told(prompt, ground_truth, extra_info, data_source):
    calls.append(data_source)
    if isinstance(prompt, str):
        return f"{prompt} {extra_info['hint']} {len(calls)}"
    return [*prompt, {"role": "system", "content": ground_truth}]

def fails(prompt, ground_truth, extra_info, data_source):
    return extra_info["nothing"]

def wrong(prompt, ground_truth, extra_info, data_source):
    return 7
"""


def context(directory: Path, tokenizer: PreTrainedTokenizerBase, name: str, max_tokens: int = 50) -> PromptContext:
    (directory / "own.py").write_text(FILE)
    return PromptContext(f"{directory}/own.py:{name}", tokenizer, max_tokens)


def prompt(name: str, text: str = "two", messages: list[dict[str, str]] | None = None) -> Prompt:
    return Prompt(name, 0, [1], text, "math", "four", extra_info={"hint": "three"}, messages=messages)


def test_texts_are_read_as_they_are_and_each_prompt_is_asked_for_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = context(tmp_path, tokenizer, "told")([prompt("a"), prompt("a"), prompt("b", "one")])
    texts = ["two three 1", "two three 1", "one three 2"]
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_messages_go_through_the_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    asked = prompt("a", messages=[{"role": "user", "content": "two"}])
    assert context(tmp_path, tokenizer, "told")([asked]) == [
        tokenizer("[u]two\n[s]four\n[a]", add_special_tokens=False)["input_ids"]
    ]


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("fails", 50, ["own.py:fails", "'a'", "KeyError", "line 11", "correct the function"]),
        ("wrong", 50, ["teacher.context", "prompt 'a'", "7"]),
        ("told", 2, ["own.py:told", "'a'", "11 tokens", "1 and 2", "trainer.forward_tokens"]),
    ],
)
def test_what_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, limit: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        context(tmp_path, tokenizer, name, limit)([prompt("a")])
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_prompt_with_images_has_no_other_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    seen = replace(prompt("a"), images=("0f",))
    with pytest.raises(ConfigError, match=r"prompt 'a' has images.*set teacher\.context=null"):
        context(tmp_path, tokenizer, "told")([seen])
