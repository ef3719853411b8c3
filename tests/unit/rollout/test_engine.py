"""Test the part that all engines share."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.engine import begin_version, new_token_limits, refuse_foreign_code, stop_token_ids
from rlhf_mcore.types import Request, Sampling


def request(prompt_ids: list[int]) -> Request:
    return Request(0, "prompt 'bad', sample 2", prompt_ids, Sampling(max_new_tokens=6), seed=0)


def test_a_response_has_the_tokens_that_were_asked_for_or_that_there_is_room_for() -> None:
    assert new_token_limits([request([5, 6, 7]), request([5])], max_model_len=8) == [5, 6]


@pytest.mark.parametrize(
    ("syncs", "expected"),
    [
        ([(6, 4)], [(0, 3), (6, 4)]),
        ([(0, 4)], [(0, 4)]),  # no token has the previous version
        ([(6, 4), (6, 5), (8, 6)], [(0, 3), (6, 5), (8, 6)]),
        ([(6, 3)], [(0, 3)]),  # the same weights again
        ([(6, 4), (6, 3)], [(0, 3)]),
    ],
)
def test_the_version_of_each_token_is_known(syncs: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    versions = [(0, 3)]
    for first, version in syncs:
        begin_version(versions, first, version)
    assert versions == expected


@pytest.mark.parametrize("tokens", [[], [5] * 8, [5] * 9])
def test_a_prompt_that_cannot_be_answered_is_named(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="'bad'"):
        new_token_limits([request([5]), request(tokens)], max_model_len=8)


@pytest.mark.parametrize(("declared", "stops"), [(None, [2]), (7, [2, 7]), ([9, 7], [2, 7, 9])])
def test_stop_tokens_are_those_of_tokenizer_and_generation_config(
    tmp_path: Path, declared: Any, stops: list[int]
) -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=2)
    assert stop_token_ids(str(tmp_path), tokenizer) == [2]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert stop_token_ids(str(tmp_path), tokenizer) == stops


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"auto_map": {"AutoModel": "evil.py"}}', "auto_map"),
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        (None, "no config"),
    ],
)
def test_a_model_directory_that_cannot_be_trusted_is_refused(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        refuse_foreign_code(str(tmp_path))
