"""Render chat templates of models in a separate process, which is ended if they misbehave."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import rendering
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.source import load_prompts
from tests.unit.data.conftest import tokenizer
from tests.unit.data.test_source import CHAT_ROW, write_jsonl

__all__ = ["tokenizer"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0 s of processor time"),
        ("{{ 'x' * 10 ** 11 }}", "384 MiB of memory|OverflowError"),
        ("{{ 'x' * 20_000_000 }}", "the text has 20000000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages[7].role }}", "no element 7|UndefinedError"),
        ("{% for %}", "[Ee]xpected"),
        ("{{ messages.append(1) }}", "SecurityError|not safely callable|unsafe"),
        ("{{ raise_exception('no') }}", r"roles user\): no$"),
    ],
)
def test_templates_that_misbehave_end_in_one_message(
    template: str, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    file = write_jsonl(tmp_path / "a.jsonl", CHAT_ROW)
    with pytest.raises(ConfigError, match=f"(?s)a.jsonl, line 1, column 'prompt'.*({message})"):
        load_prompts([file], tokenizer, DataConfig())


def test_the_prompt_at_which_a_template_hangs_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 0)
    hangs = "{{ 10 ** (10 ** (messages[0].content | int)) }}"
    monkeypatch.setattr(tokenizer, "chat_template", hangs)
    file = write_jsonl(tmp_path / "a.jsonl", *({"prompt": letter} for letter in "1281"))
    with pytest.raises(
        ConfigError, match=r"(?s)line 3, column 'prompt': the chat template rejects.*(processor time|ValueError)"
    ):
        load_prompts([file], tokenizer, DataConfig(apply_chat_template="true"))


BOMBS = {  # CPU time ends loops, and memory or jinja's own limits end the others
    "sort": "{{ ('xy' * 2_000_000) | sort | length }}",
    "list": "{{ ('x' * 60_000_000) | list | length }}",
    "join": "{{ range(99_999) | join('x' * 9_999) | length }}",
    "center": "{{ 'x' | center(2_000_000_000) | length }}",
    "format": "{{ '%2000000000d' | format(1) | length }}",
    "replace": "{{ ('x' * 60_000) | replace('x', 'y' * 60_000) | length }}",
    "times": "{{ 'x' * 2_000_000_000 }}",
    "lists": "{{ ([0] * 900_000_000) | length }}",
    "add": "{% set n = namespace(t='x') %}{% for i in range(34) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t | length }}",
    "method": "{{ ''.ljust(2_000_000_000) | length }}",
    "range": "{% for i in range(99_999_999_999) %}x{% endfor %}",
    "blocks": "{% set t %}{% for i in range(99_999) %}{{ 'x' * 99_999 }}{% endfor %}{% endset %}{{ t | length }}",
    "filter": "{% filter upper %}{% for i in range(99_999) %}{{ 'x' * 99_999 }}{% endfor %}{% endfilter %}",
    "pprint": "{{ ('x' * 900_000_000) | pprint | length }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_template_may_hold_in_memory_is_bounded(
    name: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "CPU_S", 1)
    monkeypatch.setattr(tokenizer, "chat_template", BOMBS[name])
    before = max(memory_of_children(), own_memory())
    [answer] = rendering.in_child(Renderer(tokenizer, "true")._apply, [[{"role": "user", "content": "a"}]])
    ends = "384 MiB of memory|processor time|OverflowError|ended with|Range too big|SecurityError|characters"
    assert re.search(ends, answer["error"])
    assert memory_of_children() - before < 450 * 2**20


def memory_of_children() -> int:
    """Return the largest memory of a child in bytes. It starts with its parent's memory."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def own_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_the_longest_prompt_is_rendered(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "{% for m in messages %}{{ '<user>' + m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", longest)
    content = "\u4e2d" * (rendering.MAX_CHARACTERS - 6)
    [answer] = rendering.in_child(Renderer(tokenizer, "true")._apply, [[{"role": "user", "content": content}]])
    assert answer == {"text": f"<user>{content}"}
