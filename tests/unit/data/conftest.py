"""A character tokenizer with a chat template, small enough to be built in every session."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.unit.parallel.world import world

__all__ = ["world"]

# Rejects two consecutive messages with the same role, like the templates of many families.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role[0] }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    characters = string.printable + "é"
    vocabulary = {"<unk>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(characters)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture
def tokenizer_directory(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    directory = tmp_path / "tokenizer"
    tokenizer.save_pretrained(directory)
    return directory
