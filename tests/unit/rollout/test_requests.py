"""What every engine does before and after its own work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.requests import (
    Completion,
    Request,
    check_completion,
    expand_requests,
    refuse_foreign_code,
    stop_token_ids,
    to_trajectories,
)
from rlhf_mcore.rollout.seeds import request_seed
from rlhf_mcore.types import Prompt, Sampling

PROMPT = Prompt("sum-17", 17, [5, 6, 7], "2+2")
REQUEST = Request(PROMPT, 3, 0, 8)


class Letters:
    """A tokenizer of letters whose token 0 is special."""

    eos_token_id = 0

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(96 + token) for token in row if token) for row in rows]


def test_samples_of_a_prompt_are_adjacent_and_seeded_by_the_row_of_the_prompt() -> None:
    other = Prompt("sum-4", 4, [5], "1")
    requests = expand_requests([PROMPT, other], Sampling(n=2, max_new_tokens=6, seed=9), step=5, max_model_len=8)
    assert [(r.prompt.prompt_id, r.sample) for r in requests] == [
        ("sum-17", 0),
        ("sum-17", 1),
        ("sum-4", 0),
        ("sum-4", 1),
    ]
    assert [r.seed for r in requests] == [request_seed(9, 5, row, k) for row in (17, 4) for k in (0, 1)]
    assert [r.max_new_tokens for r in requests] == [5, 5, 6, 6]  # 8 - 3 tokens of prompt, and what was asked for


@pytest.mark.parametrize("tokens", [[], [5] * 8, [5] * 9])
def test_a_prompt_that_cannot_be_answered_is_named(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="'bad'"):
        expand_requests([Prompt("bad", 0, tokens, "")], Sampling(), step=0, max_model_len=8)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], [], "stop"), "no token"),
        (Completion([1, 2], [-0.5], "stop"), "1 logprobs for 2 tokens"),
        (Completion([1], [-0.5, -0.5], "stop"), "2 logprobs for 1 tokens"),
        (Completion([1, 2], [-0.5, float("nan")], "stop"), "nan at token 1"),
        (Completion([1], [float("-inf")], "stop"), "-inf at token 0"),
        (Completion([1], [0.5], "stop"), "0.5 at token 0"),
        (Completion([1], [-0.5], "abort"), "'abort'"),
    ],
)
def test_what_must_not_be_trained_on_is_refused_by_name(completion: Completion, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        check_completion(REQUEST, completion)
    assert "'sum-17', sample 3" in str(raised.value)


def test_trajectories_carry_everything() -> None:
    completions = [Completion([8, 9, 0], [-0.1, -0.2, -0.3], "stop")]
    tokenizer: Any = Letters()
    [trajectory] = to_trajectories([REQUEST], completions, tokenizer, policy_version=4)
    assert (trajectory.prompt, trajectory.sample, trajectory.versions) == (PROMPT, 3, ((len(PROMPT.prompt_ids), 4),))
    assert (trajectory.sampled_ids.tolist(), trajectory.response_text) == ([8, 9, 0], "hi")
    assert trajectory.logprobs[-3:].tolist() == pytest.approx([-0.1, -0.2, -0.3]) and trajectory.finish_reason == "stop"


def test_a_lost_completion_is_noticed() -> None:
    tokenizer: Any = Letters()
    with pytest.raises(RuntimeError, match="0 completions for 1 requests"):
        to_trajectories([REQUEST], [], tokenizer, policy_version=0)


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
