from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import load_tokenizer, token_ids
from tests.messages import expect_error


def change_settings(directory: Path, **settings: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_pads_with_the_end_of_sequence_token_when_there_is_no_pad_token(tokenizer_directory: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_directory))
    assert tokenizer.eos_token_id == 1
    assert tokenizer.pad_token_id == 1


def test_keeps_a_pad_token_of_its_own(tokenizer_directory: Path) -> None:
    change_settings(tokenizer_directory, pad_token="<unk>")
    assert load_tokenizer(str(tokenizer_directory)).pad_token_id == 0


def test_refuses_a_tokenizer_that_cannot_end_a_response(tokenizer_directory: Path) -> None:
    change_settings(tokenizer_directory, eos_token=None)
    with expect_error(ConfigError, field="eos_token"):
        load_tokenizer(str(tokenizer_directory))


def test_refuses_code_that_comes_with_a_model(tokenizer_directory: Path) -> None:
    change_settings(tokenizer_directory, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    with pytest.raises(ConfigError, match="auto_map"):
        load_tokenizer(str(tokenizer_directory))


def test_names_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*no such directory"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_names_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_pattern_without_an_end_is_named(tokenizer_directory: Path) -> None:
    """The library stops after some millions of steps, by an exception that is none of Python's."""
    path = tokenizer_directory / "tokenizer.json"
    pattern = {"type": "Split", "pattern": {"Regex": "(x|x)*$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": pattern}))
    tokenizer = load_tokenizer(str(tokenizer_directory))
    assert token_ids(tokenizer, []) == []
    assert len(token_ids(tokenizer, ["7"])) == 1
    with expect_error(ConfigError, value=("2,001 characters", "retry-limit"), remedy="pattern"):
        token_ids(tokenizer, ["7", "x" * 2000 + "z"])
