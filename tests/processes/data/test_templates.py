"""Chat templates that come with a model are rendered in a process of their own, which ends where they misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import rendering
from rlhf_mcore.data.source import load_prompts
from tests.unit.data.conftest import tokenizer
from tests.unit.data.test_source import CHAT_ROW, write_jsonl

__all__ = ["tokenizer"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0 s of processor time"),
        ("{{ 'x' * 10 ** 11 }}", "GiB of memory|OverflowError"),
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
        ConfigError, match=r"(?s)line 3, column 'prompt': the chat template refuses.*(processor time|ValueError)"
    ):
        load_prompts([file], tokenizer, DataConfig(apply_chat_template="true"))
